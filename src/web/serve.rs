//! The life of the HTTP server, and of connections whose clients take nothing.
//!
//! actix-web asks a body for more only when the client has taken most of what was sent before. So a stream of
//! events cannot end itself once its client takes nothing: only the connection can be cut, from outside.

use std::{any::Any, fmt, future::pending, io, time::Duration};

use actix_http::{Request, Response};
use actix_service::IntoServiceFactory;
use actix_web::{
    Error, HttpServer,
    body::MessageBody,
    dev::{AppConfig, Extensions, Server, ServerHandle, Service, ServiceFactory},
};
use tokio::time::sleep;

use crate::manager::LockManager;

/// How long the streams of events may take to end when the server stops. They end at once, unless their clients
/// take nothing.
const TO_END: Duration = Duration::from_secs(10);

/// A connection is cut if its client takes none of the sent data for this time, which is longer than a phone is
/// without a network on its way through a tunnel.
#[cfg(target_os = "linux")]
const TO_TAKE: Duration = Duration::from_secs(30);

/// What [`LockManager::serve`] runs: an [`HttpServer`] that is bound to its addresses, or a [`Server`] that is already
/// made from one.
pub trait IntoServer {
    /// The server, with the settings that locks need.
    fn into_server(self) -> Server;

    /// The same server without its own handling of signals, and whether that was possible.
    #[doc(hidden)]
    fn without_signals(self) -> (Self, bool)
    where
        Self: Sized,
    {
        (self, false)
    }
}

impl IntoServer for Server {
    fn into_server(self) -> Server {
        self
    }
}

impl<F, I, S, B> IntoServer for HttpServer<F, I, S, B>
where
    F: Fn() -> I + Send + Clone + 'static,
    I: IntoServiceFactory<S, Request>,
    S: ServiceFactory<Request, Config = AppConfig> + 'static,
    S::Error: Into<Error> + 'static,
    S::InitError: fmt::Debug,
    S::Response: Into<Response<B>> + 'static,
    <S::Service as Service<Request>>::Future: 'static,
    S::Service: 'static,
    B: MessageBody + 'static,
{
    /// With `h1_allow_half_closed(false)`: a client that hangs up while it waits should no longer get the lock.
    fn into_server(self) -> Server {
        self.h1_allow_half_closed(false).run()
    }

    fn without_signals(self) -> (Self, bool) {
        (self.disable_signals(), true)
    }
}

impl LockManager {
    /// Runs the HTTP server until it stops, and then [shuts the manager down](Self::shutdown).
    ///
    /// Use it instead of `server.await` if pages open event streams or wait for locks: a graceful stop
    /// waits for those requests, for 30 s by default. So this method ends them when `SIGTERM` arrives.
    /// actix-web receives the signal as well, and stops as usual. If you stop the server by its
    /// [`ServerHandle`](actix_web::dev::ServerHandle), call [`begin_shutdown`](Self::begin_shutdown)
    /// first.
    ///
    /// With a [drain delay](crate::LockManagerBuilder::drain_delay), an [`HttpServer`] first goes on to serve
    /// requests for that time, while health says `stopping`.
    ///
    /// It also sets [`h1_allow_half_closed(false)`](HttpServer::h1_allow_half_closed) on an [`HttpServer`]: a client
    /// that closes its connection while it waits for a lock leaves the queue. Set it yourself on a server that you
    /// `run` yourself.
    ///
    /// If a stream of events is still open 10 s after the signal, because its client takes nothing, all
    /// connections are cut, with the requests that are under way by then.
    ///
    /// ```no_run
    /// # use actix_doclock::{LockManager, MemoryStore};
    /// # use actix_web::{App, HttpServer};
    /// # #[actix_web::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockManager::builder(MemoryStore::new()).build().await?;
    /// let server = HttpServer::new(|| App::new()).bind("127.0.0.1:8080")?;
    /// locks.serve(server).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The errors of the server.
    pub async fn serve(&self, server: impl IntoServer) -> io::Result<()> {
        let drain = self.core.settings.drain_delay;
        let (server, has_our_signals) =
            if drain.is_zero() { (server, false) } else { server.without_signals() };
        let server = server.into_server();
        let handle = has_our_signals.then(|| server.handle());
        let served = tokio::select! {
            served = server => served,
            // Drops the server, which cuts its connections.
            () = self.is_stopped_in_vain(handle, drain) => Ok(()),
        };
        self.shutdown().await;
        served
    }

    /// Resolves if streams are still open some time after the signal to stop.
    async fn is_stopped_in_vain(&self, server: Option<ServerHandle>, drain: Duration) {
        told_to_stop(server.as_ref()).await;
        if let Some(server) = server {
            self.core.stop_begins.cancel();
            log::info!(
                target: "actix_doclock::web",
                "told to stop: health says so for {drain:?}, and requests are still served",
            );
            sleep(drain).await;
            // The call sends the command. The end of the server is awaited elsewhere.
            drop(server.stop(true));
        }
        self.begin_shutdown();
        sleep(TO_END).await;
        match self.core.event_streams.count() {
            0 => pending().await,
            open => log::warn!(
                target: "actix_doclock::web",
                "all connections are cut, because the clients of {open} event streams take nothing",
            ),
        }
    }

    /// Cuts a connection if its client takes none of the sent data for 30 s. Call this function for each
    /// connection:
    ///
    /// ```no_run
    /// # use actix_doclock::LockManager;
    /// # use actix_web::{App, HttpServer};
    /// # fn server() -> std::io::Result<()> {
    /// let server = HttpServer::new(|| App::new())
    ///     .on_connect(LockManager::cut_slow_readers)
    ///     .bind("127.0.0.1:8080")?;
    /// # Ok(()) }
    /// ```
    ///
    /// Without it, a client that reads nothing keeps its connection and its event stream for as long as it
    /// likes, because actix-web has no time limit for writing. Behind a reverse proxy you do not need it: the
    /// proxy reads, and has such a limit.
    ///
    /// It sets `TCP_USER_TIMEOUT` on Linux. It does nothing on other systems, nor where actix-web itself
    /// decrypts TLS: then set that option on the socket for [`listen`](actix_web::HttpServer::listen), from
    /// which all connections inherit it.
    pub fn cut_slow_readers(connection: &dyn Any, _: &mut Extensions) {
        #[cfg(target_os = "linux")]
        if let Some(connection) = connection.downcast_ref::<actix_web::rt::net::TcpStream>() {
            // Fails only if the connection is already gone.
            let _ = socket2::SockRef::from(connection).set_tcp_user_timeout(Some(TO_TAKE));
        }
        #[cfg(not(target_os = "linux"))]
        let _ = connection;
    }
}

/// Resolves at `SIGTERM`. Never resolves if the system has no such signal, or if this process cannot listen for it.
///
/// With a handle, `SIGINT` and `SIGQUIT` stop the server at once, as actix-web does.
async fn told_to_stop(server: Option<&ServerHandle>) {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Some(server) = server
            && let (Ok(mut terminate), Ok(mut interrupt), Ok(mut quit)) = (
                signal(SignalKind::terminate()),
                signal(SignalKind::interrupt()),
                signal(SignalKind::quit()),
            )
        {
            tokio::select! {
                _ = terminate.recv() => return,
                _ = interrupt.recv() => {}
                _ = quit.recv() => {}
            }
            drop(server.stop(false));
            return pending().await;
        }
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            terminate.recv().await;
            return;
        }
    }
    pending().await
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use actix_web::rt::net::TcpStream;
    use tokio::net::TcpListener;

    use super::*;

    #[actix_web::test]
    async fn a_connection_gets_a_time_limit_for_what_is_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (connection, _) = listener.accept().await.unwrap();
        LockManager::cut_slow_readers(&connection, &mut Extensions::new());
        let set = socket2::SockRef::from(&connection).tcp_user_timeout().unwrap();
        assert_eq!(set, Some(TO_TAKE));
    }
}
