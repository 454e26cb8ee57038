//! The stream of events that the pages of a browser share.

use super::*;

#[actix_web::test]
async fn the_stream_of_a_browser_reports_the_documents_of_all_its_tabs_and_opens_anew_for_each() {
    embedded(&["--ttl-secs", "60"], async |stage| {
        let first = empty_page(stage).await;
        let asked: bool = script(
            &first,
            "window.lock = DocLock.open(url(0)); \
             await until(() => streams.length); \
             return streams.at(-1).endsWith('&keys=' + key(0))",
        )
        .await;
        assert!(asked, "only its own document");

        let second = first.beside(&stage.editor.url("/page.css")).await;
        script::<()>(
            &second,
            "window.heard = new Set(); \
             window.lock = DocLock.open(url(1), { acquire: false, onchange: it => heard.add(it.state) }); \
             await until(() => lock.state === 'free')",
        )
        .await;
        script::<()>(
            &first,
            "await until(() => streams.at(-1).includes(key(0)) && streams.at(-1).includes(key(1)))",
        )
        .await;

        let before: usize = script(&first, "return streams.length").await;
        let streams: usize = script(&second, "DocLock.reconnect(); return streams.length").await;
        assert_eq!(streams, 0, "the stream is in the other tab");
        script::<()>(&first, &format!("await until(() => streams.length > {before})")).await;

        let every: bool = script(
            &second,
            "window.events = []; \
             DocLock.events('/locks', event => events.push(event.key)); \
             return !streams.length",
        )
        .await;
        assert!(every);
        script::<()>(&first, "await until(() => !streams.at(-1).includes('keys='))").await;
    })
    .await;
}

/// A half-open connection raises no error. The stream may be in a hidden tab, whose timers are slow.
#[actix_web::test]
async fn a_stream_that_is_silent_or_was_open_during_a_sleep_is_opened_anew_in_whatever_tab_it_is() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let first = empty_page(stage).await;
        first.run::<()>("window.setInterval = () => 0").await;
        script::<()>(
            &first,
            "const Source = EventSource; \
             window.EventSource = class extends Source { \
                 addEventListener(type, listener) { \
                     const number = streams.length; \
                     super.addEventListener(type, it => number > dead && listener(it)); \
                 } \
             }; \
             window.dead = 0; \
             DocLock.events('/locks', () => {}); \
             await until(() => streams.length)",
        )
        .await;
        let opened = async || script::<usize>(&first, "return streams.length").await;
        let silence =
            "performance.now = (real => () => real() + 60_000)(performance.now.bind(performance))";
        let sleep = "Date.now = (real => () => real() + 60_000)(Date.now)";
        for (clock, is_dead) in [(silence, true), (sleep, false)] {
            let before = opened().await;
            let second = first.beside(&stage.editor.url("/page.css")).await;
            // Its clock stands still until `tick()`: a pause of a slow machine would count as sleep.
            second
                .run::<()>(
                    "const now = Date.now(); \
                     Date.now = () => now; \
                     window.setInterval = tick => { window.tick = tick; }",
                )
                .await;
            script::<()>(&second, "await untilLive()").await;
            assert_eq!(opened().await, before);
            if is_dead {
                first.run::<()>(&format!("window.dead = streams.length; {clock}")).await;
            }
            // In one step: chromedriver hides a tab when it turns to another one.
            let said = if is_dead { "silent" } else { "reconnect" };
            script::<()>(
                &second,
                &format!(
                    "let said = ''; \
                     new BroadcastChannel('doclock-feed3:/locks').onmessage = ({{ data }}) => {{ said += data.type; }}; \
                     await until(() => document.visibilityState === 'visible'); \
                     {clock}; \
                     tick(); \
                     await until(() => said.includes('{said}'))"
                ),
            )
            .await;
            eventually("a new stream", async || opened().await > before).await;
            assert_eq!(script::<usize>(&second, "return streams.length").await, 0);
            second.close().await;
        }
    })
    .await;
}

/// A page hears the heartbeat of the server, and opens no live stream anew. On its clocks, 20 seconds pass before each beat.
#[actix_web::test]
async fn a_stream_without_changes_stays_open() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let page = empty_page(stage).await;
        page.run::<()>(
            "let time = Date.now(); \
             Date.now = performance.now = () => time; \
             window.setInterval = tick => { window.tick = () => { time += 1_000; tick(); }; }",
        )
        .await;
        let opened: usize = script(
            &page,
            "const Source = EventSource; \
             let beats = 0; \
             const beat = () => { beats++; for (let n = 0; n < 20; n++) tick(); }; \
             window.EventSource = class extends Source { \
                 constructor(url) { super(url); this.addEventListener('beat', beat); } \
             }; \
             DocLock.events('/locks', () => {}); \
             await until(() => beats > 1); \
             return streams.length",
        )
        .await;
        assert_eq!(opened, 1);
    })
    .await;
}

#[actix_web::test]
async fn a_waiting_page_keeps_its_session_alive() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        edit_first(&stage.person("bob").await).await;
        let page = empty_page(stage).await;
        // The answer after a wait extends no session.
        let waits: Vec<u32> = script(
            &page,
            "const real = window.fetch, waits = []; \
             window.fetch = async (url, init) => { \
                 const wait = JSON.parse(init?.body ?? '{}').wait_ms; \
                 if (wait !== undefined) waits.push(wait); \
                 if (wait > 1) { \
                     await new Promise(over => setTimeout(over, 1200)); \
                     init = { ...init, body: init.body.replace(wait, 1) }; \
                 } \
                 return real(url, init); \
             }; \
             window.one = DocLock.open(url(0), { wait: true }); \
             await until(() => waits.length >= 5); \
             return waits.slice(0, 5)",
        )
        .await;
        assert_eq!(waits, [0, 25_000, 1, 25_000, 1]);
    })
    .await;
}

/// HTTP/1.1 allows six connections to a server. On plain http the visible pages wait.
#[actix_web::test]
async fn of_all_pages_of_a_browser_one_has_a_waiting_request() {
    embedded(&["--ttl-secs", "600"], async |stage| {
        let holder = stage.person("bob").await;
        edit_first(&holder).await;
        let mut pages = vec![empty_page(stage).await];
        for _ in 1..7 {
            pages.push(pages[0].beside(&stage.editor.url("/page.css")).await);
        }
        for page in &pages {
            script::<()>(
                page,
                "window.long = []; \
                 const real = window.fetch; \
                 window.fetch = async (url, init) => { \
                     const it = [Date.now()]; \
                     if (init?.body?.includes('\"wait_ms\":25')) long.push(it); \
                     try { return await real(url, init); } finally { it.push(Date.now()); } \
                 }; \
                 window.one = DocLock.open(url(0), { wait: true }); \
                 await until(() => sent.some(it => it.body?.includes('\"wait_ms\":1}') || long.length)); \
                 return null",
            )
            .await;
        }
        // The turn may go from page to page meanwhile.
        let mut long: Vec<(f64, f64)> = Vec::new();
        for page in &pages {
            let waits = "return long.map(([begin, end]) => [begin, end ?? Date.now()])";
            long.extend(page.run::<Vec<(f64, f64)>>(waits).await);
        }
        long.sort_by(|a, b| a.0.total_cmp(&b.0));
        // The clocks of two processes may differ by a moment.
        assert!(long.windows(2).all(|it| it[0].1 <= it[1].0 + 50.0), "{long:?}");
        script::<()>(&pages[0], "await fetch('/api/workitem'); return null").await;
        holder.click("close").await;
        eventually("one of them has it", async || {
            let mut held = 0;
            for page in &pages {
                held += page.run::<i32>("return Number(one.state === 'mine')").await;
            }
            held == 1
        })
        .await;
    })
    .await;
}
