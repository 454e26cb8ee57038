//! A server dies in the middle of a sweep.

use super::*;

// ---- a killed server ------------------------------------------------------------------------------

const CHILD_URI: &str = "DOCLOCK_TEST_CHILD_URI";

const CHILD_DIRECT_URI: &str = "DOCLOCK_TEST_CHILD_DIRECT_URI";
const CHILD_DATABASE: &str = "DOCLOCK_TEST_CHILD_DATABASE";

/// Another application server, in a separate process, that sweeps once when it is told to. Its listener
/// records the announcements in the collection `told`.
struct Sweeper {
    process: Child,
    /// Must stay open as long as the process may write.
    _output: BufReader<ChildStdout>,
}

impl Sweeper {
    /// Its name at the server.
    const NAME: &str = "sweeper";

    fn start(uri: &str, direct_uri: &str, database: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "ends::killed::sweeps_as_a_child_of_another_test",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env(CHILD_URI, uri)
            .env(CHILD_DIRECT_URI, direct_uri)
            .env(CHILD_DATABASE, database)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let ready =
            output.by_ref().lines().map_while(Result::ok).any(|line| line.ends_with("ready"));
        assert!(ready, "the child has ended before it was ready");
        Self { process: child, _output: output }
    }

    fn sweep(&mut self) {
        writeln!(self.process.stdin.as_mut().unwrap(), "sweep").unwrap();
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }
}

/// Kills the process like `kill -9`.
impl Drop for Sweeper {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "a part of another test, which starts it as a process"]
fn sweeps_as_a_child_of_another_test() {
    let variable = |name| env::var(name).unwrap();
    let name = variable(CHILD_DATABASE);
    Runtime::new().unwrap().block_on(async {
        let told: Collection<Document> =
            client(&variable(CHILD_DIRECT_URI)).await.database(&name).collection("told");
        let database = client(&variable(CHILD_URI)).await.database(&name);
        let app = App::with(&database, |settings| {
            settings.on_session_end(move |ended: SessionEnded| {
                let told = told.clone();
                async move {
                    told.insert_one(to_record(&ended)).await?;
                    Ok(())
                }
            })
        });
        let app = app.await;
        // The announcer has asked once since it was started.
        sleep(Duration::from_millis(100)).await;
        println!("ready");
        stdin().lock().read_line(&mut String::new()).unwrap();
        app.locks.sweep().await.unwrap();
        nothing_is_left_to_announce(&database).await;
    });
}

fn to_record(ended: &SessionEnded) -> Document {
    let mut locks: Vec<_> = ended.locks.iter().map(ToString::to_string).collect();
    locks.sort();
    doc! {
        "aid": ended.aid.as_str(),
        "event": ended.event.to_string(),
        "locks": locks,
        "repeated": ended.repeated,
    }
}

/// The server continues with received commands when their client is killed. If it is late enough, such
/// a command would renew a lease that the test has let pass.
async fn until_it_sends_nothing_more(database: &Database) {
    let admin = database.client().database("admin");
    eventually("its commands are done and its connections closed", async || {
        let of_it = [
            doc! { "$currentOp": { "allUsers": true, "idleConnections": true } },
            doc! { "$match": { "appName": Sweeper::NAME } },
        ];
        !admin.aggregate(of_it).await.unwrap().advance().await.unwrap()
    })
    .await;
}

/// The server is killed before its first command, its second, and so on, until no command is left;
/// another server continues. A second announcement has the `event` of the first and says that it is
/// `repeated`.
#[tokio::test]
async fn a_server_killed_in_a_sweep_leaves_nothing_undone() {
    let server = mongod::local_replica_set().await;
    let mut killed = 0;
    for commands in 0.. {
        let database = client(&server.uri()).await.database(&fresh_name());
        let survivor = App::on(&database).await;
        let aids = sessions(&survivor, 3).await;
        age_all(&database, TTL).await;
        let proxy = Proxy::start(server.port());
        let uris =
            [proxy.uri(), server.uri()].map(|uri| format!("{uri}&appName={}", Sweeper::NAME));
        let mut sweeper = Sweeper::start(&uris[0], &uris[1], database.name());
        proxy.hold_any_request(commands);
        sweeper.sweep();
        let began = Instant::now();
        while proxy.fired() == 0 && !sweeper.has_ended() {
            assert!(began.elapsed() < NO_DEADLINE, "neither held nor done");
            sleep(Duration::from_millis(5)).await;
        }
        let was_held = proxy.fired() > 0;
        drop((sweeper, proxy));
        until_it_sends_nothing_more(&database).await;
        killed += usize::from(was_held);

        let_leases_pass(&database).await;
        let heard = Heard::default();
        let other = App::with(&database, heard.listening()).await;
        other.locks.sweep().await.unwrap();
        nothing_is_left_to_announce(&database).await;
        other.locks.shutdown().await;

        assert_eq!(count(&database).await, 0, "killed after {commands} commands");
        let mut told: BTreeMap<String, Vec<Document>> = BTreeMap::new();
        let mut by_child = database.collection::<Document>("told").find(doc! {}).await.unwrap();
        while by_child.advance().await.unwrap() {
            let record = by_child.deserialize_current().unwrap();
            told.entry(record.get_str("aid").unwrap().into()).or_default().push(record);
        }
        for ended in heard.all() {
            told.entry(ended.aid.as_str().into()).or_default().push(to_record(&ended));
        }
        for aid in &aids {
            let told = told.get(aid.as_str()).map_or(&[][..], |told| told);
            assert!(!told.is_empty(), "killed after {commands} commands: {aid:?} is not announced");
            for (n, record) in told.iter().enumerate() {
                assert_eq!(record.get_array("locks").unwrap().len(), 2, "{commands}: {record}");
                assert_eq!(record.get_str("event").unwrap(), told[0].get_str("event").unwrap());
                assert!(n == 0 || record.get_bool("repeated").unwrap(), "{commands}: {told:?}");
            }
        }
        if !was_held {
            break;
        }
    }
    // Find, claim, name, remove, announce: a sweep has at least this many steps.
    assert!(killed >= 8, "killed {killed} times");
}

/// A save touched the lock before the lock expired, and commits after a contender has noted the expiry.
/// The lock is live again under the same token. The note is about its earlier lease.
#[tokio::test]
async fn a_lock_renewed_by_a_late_commit_is_announced_when_it_expires_again() {
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let (alice, bob) = (Aid::new(), Aid::new());
    app.granted(&key("a"), &alice).await;
    age(&database, &key("a"), TTL).await;
    let expired = record(&database, &key("a")).await.unwrap();
    // Bob notes the expired lock and takes it over; a commit in between would find this state.
    let lock = app.granted(&key("a"), &bob).await;
    app.locks.release(&lock).await.unwrap();
    let mut renewed = expired;
    renewed.insert("ts", DateTime::now());
    lock_records(&database).insert_one(renewed).await.unwrap();
    app.locks.sweep().await.unwrap();
    assert!(heard.of(&alice).is_empty(), "it has a live lock");
    age(&database, &key("a"), TTL).await;
    app.granted(&key("a"), &bob).await;
    app.locks.sweep().await.unwrap();
    eventually("alice is announced", async || heard.of(&alice).len() == 1).await;
    assert_eq!(heard.of(&alice)[0].locks, [key("a")]);
}

/// Written by hand, or by a program that restores a part of a backup.
#[tokio::test]
async fn a_trace_whose_lease_is_no_text_stops_no_sweep() {
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let traces = database.collection::<Document>("doclock.ended");
    for lease in [Bson::from(5), DateTime::now().into(), Bson::Null, Bson::Array(Vec::new())] {
        let trace = doc! {
            "_id": Uuid::new_v4().to_string(), "ts": DateTime::now(), "step": "look",
            "aid": Uuid::new_v4().to_string(), "c": "workitem", "id": "a", "lease": lease,
        };
        traces.insert_one(trace).await.unwrap();
    }
    let alice = Aid::new();
    app.granted(&key("a"), &alice).await;
    age(&database, &key("a"), TTL).await;
    app.locks.sweep().await.unwrap();
    eventually("alice is announced", async || heard.of(&alice).len() == 1).await;
}

/// A contender finds the expired lock, the sweep removes the lock and announces its session, and only
/// then does the contender write the trace.
#[tokio::test]
async fn a_trace_written_after_the_sweep_is_not_announced_again() {
    let database = replica_set().await;
    let heard = Heard::default();
    let app = App::with(&database, heard.listening()).await;
    let (alice, bob) = (Aid::new(), Aid::new());
    for id in ["a", "b"] {
        app.granted(&key(id), &alice).await;
        age(&database, &key(id), TTL).await;
    }
    let expired = record(&database, &key("a")).await.unwrap();
    app.locks.sweep().await.unwrap();
    eventually("alice is announced", async || heard.of(&alice).len() == 1).await;
    nothing_is_left_to_announce(&database).await;
    // The same lease once more: a takeover of it leaves the trace.
    lock_records(&database).insert_one(expired).await.unwrap();
    app.granted(&key("a"), &bob).await;
    let traces = database.collection::<Document>("doclock.ended");
    let unseen = doc! { "step": "look", "aid": alice.as_str() };
    assert_eq!(traces.count_documents(unseen.clone()).await.unwrap(), 1);
    app.locks.sweep().await.unwrap();
    assert_eq!(traces.count_documents(unseen).await.unwrap(), 0);
    nothing_is_left_to_announce(&database).await;
    assert_eq!(heard.of(&alice).len(), 1);
}
