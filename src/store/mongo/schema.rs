//! The needs of the store in the database, and the dangers that other programs have brought there.
//!
//! | file | task |
//! |---|---|
//! | [`requirements`], [`index`] | the needs: collections, indexes, actions of the database user |
//! | [`create_indexes`] | prepares a collection |
//! | [`owner`], [`danger`] | whose collection it is; what locks cannot live with |
//! | [`survey`], [`status`] | compares a database with the needs, for the doctor and for health |
//! | [`absent`] | why a document is not found, if the collection is to blame |

pub(super) mod absent;
pub(super) mod create_indexes;
pub(super) mod danger;
pub(super) mod index;
pub(super) mod owner;
pub(super) mod requirements;
pub(super) mod status;
pub(super) mod survey;
