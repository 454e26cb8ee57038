//! The routes for the load balancer, for Prometheus, and for the person on call.
//!
//! In this example they are open to everybody. Do not make them public in production.

use actix_doclock::LockManager;
use actix_web::{
    HttpResponse, Responder,
    web::{Data, ServiceConfig, get},
};

pub(crate) fn configure(config: &mut ServiceConfig) {
    config.route("/health", get().to(health));
    metrics::configure(config);
}

async fn health(locks: Data<LockManager>) -> impl Responder {
    let report = locks.check_health().await;
    let mut answer =
        if report.is_ready() { HttpResponse::Ok() } else { HttpResponse::ServiceUnavailable() };
    answer.json(report)
}

pub(crate) mod metrics {
    use std::{sync::OnceLock, time::Duration};

    use actix_doclock::BoxError;
    use actix_web::{
        HttpResponse, Responder, rt,
        web::{ServiceConfig, get},
    };
    use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

    /// From a command to a nearby database up to a wait of half a minute.
    const SECONDS: [f64; 15] = [
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    ];

    /// The process has only one recorder.
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

    /// Call this before anything is counted.
    pub(crate) fn install() -> Result<(), BoxError> {
        let prometheus = PrometheusBuilder::new().set_buckets(&SECONDS)?.install_recorder()?;
        actix_doclock::metrics::describe();
        let recorder = RECORDER.get_or_init(|| prometheus);
        // Without this upkeep, the measured times would pile up if nobody scrapes them.
        rt::spawn(async {
            loop {
                rt::time::sleep(Duration::from_secs(5)).await;
                recorder.run_upkeep();
            }
        });
        Ok(())
    }

    pub(super) fn configure(config: &mut ServiceConfig) {
        config.route("/metrics", get().to(scraped));
    }

    async fn scraped() -> impl Responder {
        let metrics = RECORDER.get().map(PrometheusHandle::render);
        HttpResponse::Ok()
            .content_type("text/plain; version=0.0.4")
            .body(metrics.unwrap_or_default())
    }
}
