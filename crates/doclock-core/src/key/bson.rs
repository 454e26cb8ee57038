//! Ids in BSON.

use mongodb::bson::{Binary, Bson, oid::ObjectId, spec::BinarySubtype};
use uuid::Uuid;

use crate::key::LockId;

impl From<ObjectId> for LockId {
    fn from(id: ObjectId) -> Self {
        Self::ObjectId(id.bytes())
    }
}

impl From<&LockId> for Bson {
    fn from(id: &LockId) -> Self {
        match id {
            LockId::ObjectId(bytes) => ObjectId::from_bytes(*bytes).into(),
            LockId::String(s) => s.as_str().into(),
            LockId::Int32(n) => (*n).into(),
            LockId::Int64(n) => (*n).into(),
            LockId::Uuid(uuid) => {
                Binary { subtype: BinarySubtype::Uuid, bytes: uuid.as_bytes().to_vec() }.into()
            }
        }
    }
}

impl LockId {
    /// The id whose stored form is `id`. `None` for BSON types that cannot be an id. The mongo shell writes every
    /// number as a double, so a whole number may be a double.
    #[must_use]
    pub fn from_bson(id: &Bson) -> Option<Self> {
        match id {
            Bson::ObjectId(id) => Some((*id).into()),
            Bson::String(s) => Some(s.as_str().into()),
            Bson::Int32(n) => Some((*n).into()),
            Bson::Int64(n) => Some((*n).into()),
            Bson::Double(n) if n.fract() == 0.0 && n.abs() < 9e15 => Some((*n as i64).into()),
            Bson::Binary(Binary { subtype: BinarySubtype::Uuid, bytes }) => {
                Uuid::from_slice(bytes).ok().map(Into::into)
            }
            _ => None,
        }
    }
}
