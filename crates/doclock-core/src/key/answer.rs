//! The answer to a request with an invalid key in its path.

use actix_web::{
    HttpResponse, ResponseError,
    http::{StatusCode, header},
};
use serde_json::json;

use crate::key::InvalidKey;

impl ResponseError for InvalidKey {
    fn status_code(&self) -> StatusCode {
        StatusCode::BAD_REQUEST
    }

    fn error_response(&self) -> HttpResponse {
        let problem = json!({
            "type": "about:blank",
            "title": "Bad Request",
            "status": 400,
            "code": "bad_id",
            "detail": self.to_string(),
        });
        HttpResponse::build(StatusCode::BAD_REQUEST)
            .content_type("application/problem+json")
            .insert_header((header::CACHE_CONTROL, "no-store"))
            .body(problem.to_string())
    }
}
