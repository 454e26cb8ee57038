//! The life of the HTTP server.

use std::io;

use actix_web::dev::Server;

use crate::manager::LockManager;

impl LockManager {
    /// Runs the HTTP server until it stops, and then [shuts the manager down](Self::shutdown).
    ///
    /// Use it instead of `server.await` if pages open event streams or wait for locks: a graceful stop
    /// waits for those requests, for 30 s by default. So this method ends them when `SIGTERM` arrives.
    /// actix-web receives the signal as well, and stops as usual. If you stop the server by its
    /// [`ServerHandle`](actix_web::dev::ServerHandle), call [`begin_shutdown`](Self::begin_shutdown)
    /// first.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockManager, MemoryStore};
    /// # use actix_web::{App, HttpServer};
    /// # #[actix_web::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockManager::builder(MemoryStore::new()).build().await?;
    /// let server = HttpServer::new(|| App::new()).bind("127.0.0.1:8080")?.run();
    /// locks.serve(server).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The errors of the server.
    pub async fn serve(&self, server: Server) -> io::Result<()> {
        let mut server = std::pin::pin!(server);
        let served = tokio::select! {
            served = &mut server => served,
            () = told_to_stop() => {
                self.begin_shutdown();
                server.await
            }
        };
        self.shutdown().await;
        served
    }
}

/// Never resolves if the system has no such signal, or if this process cannot listen for it.
async fn told_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            terminate.recv().await;
            return;
        }
    }
    std::future::pending().await
}
