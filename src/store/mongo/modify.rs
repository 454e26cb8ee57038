//! findAndModify, sent once.

use mongodb::{
    bson::{Bson, Document, doc},
    error::{Error, Result},
};

use super::{Prepared, majority_acknowledges};

/// What came of it.
pub(super) struct Modified {
    /// As it is afterwards; `None` if no record matched.
    pub(super) record: Option<Document>,
    /// It was not there before.
    pub(super) is_new: bool,
}

impl Prepared {
    /// One findAndModify that the driver neither numbers nor repeats. All who call it can tell their
    /// own work from an earlier attempt, and the manager repeats it. So the server is spared the
    /// bookkeeping of a retryable write, which for a changed record means another record written:
    /// its image.
    ///
    /// `fields` none: the whole record, which costs the server less than to compute any.
    pub(super) async fn modify(
        &self,
        filter: Document,
        by: Vec<Document>,
        upsert: bool,
        fields: Option<Document>,
    ) -> Result<Modified> {
        let mut command = doc! {
            "findAndModify": self.locks.name(),
            "query": filter,
            "update": by,
            "new": true,
            "upsert": upsert,
            "writeConcern": majority_acknowledges(),
        };
        if let Some(fields) = fields {
            command.insert("fields", fields);
        }
        let database = self.locks.client().database(&self.locks.namespace().db);
        let mut reply = database.run_command(command).await?;
        // Carried out, and not known to be durable. The driver leaves this to whoever runs a command.
        if let Some(error) = reply.get("writeConcernError") {
            return Err(Error::custom(format!("no majority has acknowledged it: {error}")));
        }
        let record = match reply.remove("value") {
            Some(Bson::Document(record)) => Some(record),
            _ => None,
        };
        let is_new =
            reply.get_document("lastErrorObject").is_ok_and(|it| it.contains_key("upserted"));
        Ok(Modified { record, is_new })
    }
}
