//! The record of a page that has been left, which takes no lock any more: `{ _id: "<aid>/<page>", ts: <Date> }`. It reads as
//! a permanent end that was told.

use mongodb::bson::doc;

use crate::{
    lock::Aid,
    store::mongo::{
        ends::{Ends, end::by_aid},
        error::Result,
        send::Write,
    },
};

impl Ends<'_> {
    // update, an upsert, returns: noted. A repetition changes nothing.
    pub(super) async fn end_page(&self, page: &Aid) -> Result<()> {
        let since = doc! { "$set": { "ts": { "$ifNull": ["$ts", "$$NOW"] } } };
        self.write(by_aid(page), &Write::Upsert(vec![since])).await.map(drop)
    }
}
