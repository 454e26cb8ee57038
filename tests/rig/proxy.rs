//! A TCP proxy in front of a mongod that breaks the connection at a moment that the test chooses.

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicI64, Ordering},
};
use std::thread;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::wire::{add_to_local_time, command_name, int32, read_frame, replace_all};
use super::{POLLS, is_housekeeping};

/// How long [`Proxy::until_fired`] waits for an imminent fault.
const FIRED_WITHIN: Duration = Duration::from_secs(60);

/// A way to one mongod that can be broken. It closes when it is dropped.
///
/// The proxy runs on its own thread, so that any runtime may use it. A client must use
/// `directConnection=true`, as in [`Proxy::uri`]; otherwise it would learn the server's own address and
/// bypass the proxy.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    network: Arc<Network>,
    /// Dropping it is the signal to stop.
    _running: oneshot::Sender<()>,
}

/// The state that the proxy's handle and its connections share.
#[derive(Debug)]
struct Network {
    target: u16,
    line: watch::Sender<Line>,
    fired: watch::Sender<usize>,
    faults: Mutex<Vec<Fault>>,
    passed: Mutex<HashMap<String, usize>>,
    /// How far ahead the server's clock appears to clients of this proxy, in milliseconds.
    ahead: AtomicI64,
    /// The addresses in the server's greeting, and their replacements.
    names: Mutex<Vec<[String; 2]>>,
}

/// The state of all connections at once.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    state: LineState,
    /// How often [`Proxy::let_go`] was called.
    let_go: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum LineState {
    #[default]
    Open,
    Blackhole,
    Cut,
}

/// A one-time action on the next command of this name, or on any command after a number of others.
#[derive(Clone, Debug)]
struct Fault {
    command: Option<String>,
    after: usize,
    side: Side,
    action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Side {
    Request,
    Reply,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Drop,
    /// Until `let_go` has been called more often than this.
    Hold(usize),
}

impl Proxy {
    /// Opens a way to the mongod on port `target` of this machine.
    pub(crate) fn start(target: u16) -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("a bound listener").port();
        let network = Arc::new(Network {
            target,
            line: watch::Sender::new(Line::default()),
            fired: watch::Sender::new(0),
            faults: Mutex::default(),
            passed: Mutex::default(),
            ahead: AtomicI64::default(),
            names: Mutex::default(),
        });
        let (running, stopped) = oneshot::channel();
        let accepting = accept(listener, network.clone());
        thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    result = accepting => result.expect("a listener"),
                }
            });
        });
        Self { port, network, _running: running }
    }

    /// The URI of the mongod through this proxy.
    pub(crate) fn uri(&self) -> String {
        format!("mongodb://127.0.0.1:{}/?directConnection=true{POLLS}", self.port)
    }

    /// The next command of this name is executed, but its answer is lost with the connection.
    pub(crate) fn drop_reply_to(&self, command: &str) {
        self.arm(command, Side::Reply, Action::Drop);
    }

    /// The next command of this name is lost with the connection before it reaches the server.
    pub(crate) fn drop_request(&self, command: &str) {
        self.arm(command, Side::Request, Action::Drop);
    }

    /// The next command of this name is executed at once, but answered only after [`Self::let_go`].
    pub(crate) fn hold_reply_to(&self, command: &str) {
        self.arm(command, Side::Reply, Action::Hold(self.network.line.borrow().let_go));
    }

    /// As [`Self::hold_reply_to`], for the command and each of its repetitions.
    pub(crate) fn hold_replies_to(&self, command: &str) {
        (0..100).for_each(|_| self.hold_reply_to(command));
    }

    /// The next command of this name reaches the server only after [`Self::let_go`], even if the client
    /// has given up by then.
    pub(crate) fn hold_request(&self, command: &str) {
        self.arm(command, Side::Request, Action::Hold(self.network.line.borrow().let_go));
    }

    /// Like [`Self::hold_request`] for any command, after `after` others. The driver's own commands do
    /// not count.
    pub(crate) fn hold_any_request(&self, after: usize) {
        let action = Action::Hold(self.network.line.borrow().let_go);
        lock(&self.network.faults).push(Fault {
            command: None,
            after,
            side: Side::Request,
            action,
        });
    }

    /// Lets all held messages pass, and those that an already armed fault would hold.
    pub(crate) fn let_go(&self) {
        self.network.line.send_modify(|line| line.let_go += 1);
    }

    /// From now on nothing arrives, in either direction, and no connection breaks. Withheld messages
    /// arrive late, after [`Self::heal`].
    pub(crate) fn blackhole(&self) {
        self.set(LineState::Blackhole);
    }

    /// Breaks every connection, and each new one.
    pub(crate) fn cut(&self) {
        self.set(LineState::Cut);
    }

    /// Ends [`Self::blackhole`] and [`Self::cut`].
    pub(crate) fn heal(&self) {
        self.set(LineState::Open);
    }

    /// How many faults took place: messages dropped, held or withheld, connections cut or refused. The
    /// driver's own messages do not count, but its connections do.
    pub(crate) fn fired(&self) -> usize {
        *self.network.fired.borrow()
    }

    /// Waits until `count` faults have taken place in total.
    pub(crate) async fn until_fired(&self, count: usize) {
        let mut fired = self.network.fired.subscribe();
        let enough = timeout(FIRED_WITHIN, fired.wait_for(|&fired| fired >= count)).await;
        assert!(enough.is_ok(), "{} of {count} faults took place", self.fired());
    }

    /// How many commands of this name were passed on to the server.
    pub(crate) fn passed(&self, command: &str) -> usize {
        lock(&self.network.passed).get(command).copied().unwrap_or_default()
    }

    /// The port to reach the mongod on.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// From now on, the server's clock appears to be this many milliseconds ahead.
    pub(crate) fn set_clock_ahead(&self, millis: i64) {
        self.network.ahead.store(millis, Ordering::Relaxed);
    }

    /// From now on, the client is told that `proxies` are the members of the replica set. The driver
    /// then finds the primary but never bypasses a proxy, while the members know nothing of the
    /// proxies.
    pub(crate) fn stands_for(&self, members: &[u16], proxies: &[Self]) {
        let address = |port: u16| format!("127.0.0.1:{port}");
        let names = members.iter().zip(proxies).map(|(&member, proxy)| {
            let names = [address(member), address(proxy.port)];
            assert_eq!(names[0].len(), names[1].len(), "replaced in place: {names:?}");
            names
        });
        *lock(&self.network.names) = names.collect();
    }

    fn arm(&self, command: &str, side: Side, action: Action) {
        let command = Some(command.into());
        lock(&self.network.faults).push(Fault { command, after: 0, side, action });
    }

    fn set(&self, state: LineState) {
        self.network.line.send_modify(|line| line.state = state);
    }
}

impl Network {
    /// Takes the fault that was armed first for this command.
    fn fault_for(&self, command: &str) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let is_meant = |fault: &mut Fault| match &fault.command {
            Some(name) => name == command,
            None if is_housekeeping(command) => false,
            None => {
                let others = fault.after;
                fault.after = others.saturating_sub(1);
                others == 0
            }
        };
        let first = faults.iter_mut().position(is_meant)?;
        Some(faults.remove(first))
    }

    fn fire(&self) {
        self.fired.send_modify(|fired| *fired += 1);
    }

    /// Lets a message through as far as the line and its fault allow. False if the message is lost.
    async fn carries(&self, message: &Message, side: Side) -> bool {
        let mut line = self.line.subscribe();
        if let Some(fault) = message.fault.as_ref().filter(|fault| fault.side == side) {
            self.fire();
            match fault.action {
                Action::Drop => return false,
                Action::Hold(since) => until(&mut line, |line| line.let_go > since).await,
            }
        }
        let withheld = line.borrow().state == LineState::Blackhole;
        if withheld && !is_housekeeping(&message.command) {
            self.fire();
        }
        until(&mut line, |line| line.state != LineState::Blackhole).await;
        true
    }
}

async fn accept(listener: std::net::TcpListener, network: Arc<Network>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (client, _) = listener.accept().await?;
        tokio::spawn(connect(client, network.clone()));
    }
}

/// Serves one connection; both its ends close when this returns.
async fn connect(client: TcpStream, network: Arc<Network>) {
    let mut line = network.line.subscribe();
    let cut = until(&mut line, |line| line.state == LineState::Cut);
    let talk = async {
        // Without a server, the client simply finds its connection closed.
        if let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, network.target)).await {
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            let open = Mutex::new(Open::default());
            tokio::select! {
                _ = requests(from_client, to_server, &open, &network) => {}
                _ = replies(from_server, to_client, &open, &network) => {}
            }
        }
    };
    tokio::select! {
        // A cut comes first: a connection that is made during a cut counts as refused.
        biased;
        () = cut => network.fire(),
        () = talk => {}
    }
}

/// The unanswered requests of a connection, by their id.
#[derive(Debug, Default)]
struct Open {
    requests: HashMap<i32, Message>,
    client_gone: bool,
}

impl Open {
    fn is_done(&self) -> bool {
        self.client_gone && self.requests.is_empty()
    }
}

/// The proxy's view of a request, kept until its reply has passed.
#[derive(Debug)]
struct Message {
    command: String,
    fault: Option<Fault>,
}

async fn requests(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    open: &Mutex<Open>,
    network: &Network,
) -> io::Result<()> {
    while let Ok(frame) = read_frame(&mut client).await {
        // Only a driver's first greeting has another form.
        let command = command_name(&frame).unwrap_or_else(|| "isMaster".into());
        let message = Message { fault: network.fault_for(&command), command };
        if !network.carries(&message, Side::Request).await {
            return Ok(());
        }
        *lock(&network.passed).entry(message.command.clone()).or_default() += 1;
        lock(open).requests.insert(int32(&frame, 4), message);
        server.write_all(&frame).await?;
    }
    // The client is gone, but its request is not: the server must get to execute it.
    lock(open).client_gone = true;
    if !lock(open).is_done() {
        std::future::pending::<()>().await;
    }
    Ok(())
}

async fn replies(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    open: &Mutex<Open>,
    network: &Network,
) -> io::Result<()> {
    while !lock(open).is_done() {
        let mut frame = read_frame(&mut server).await?;
        add_to_local_time(&mut frame, network.ahead.load(Ordering::Relaxed));
        // Replies that stream in without a further request belong to the driver's monitor.
        let request = lock(open).requests.remove(&int32(&frame, 8));
        let message = request.unwrap_or(Message { command: "hello".into(), fault: None });
        if is_housekeeping(&message.command) {
            replace_all(&mut frame, &lock(&network.names));
        }
        if !network.carries(&message, Side::Reply).await {
            return Ok(());
        }
        client.write_all(&frame).await?;
    }
    Ok(())
}

async fn until(line: &mut watch::Receiver<Line>, reached: impl FnMut(&Line) -> bool) {
    line.wait_for(reached).await.expect("the network outlives its connections");
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic while locked")
}
