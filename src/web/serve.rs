//! The life of the HTTP server.

use std::io;

use actix_web::dev::Server;

use crate::manager::LockManager;

impl LockManager {
    /// Runs the HTTP server until it stops, and then [shuts the manager down](Self::shutdown).
    ///
    /// Instead of `server.await`, where pages open streams of events or wait for locks: a graceful stop
    /// waits for those requests, for 30 s by default. So when `SIGTERM` comes, they are ended; actix-web
    /// hears the signal as well and stops as ever. Who stops the server by its
    /// [`ServerHandle`](actix_web::dev::ServerHandle) calls
    /// [`begin_shutdown`](Self::begin_shutdown) before.
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
    /// Those of the server.
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

/// Where there is no such signal, or it cannot be listened for: never.
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
