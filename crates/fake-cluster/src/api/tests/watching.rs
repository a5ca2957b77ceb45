//! Watches and waiting.

use futures::{StreamExt, TryStreamExt};
use kube::ResourceExt;
use kube::api::{WatchEvent, WatchParams};
use kube::runtime::{WatchStreamExt, watcher};

use super::*;

type Events =
    std::pin::Pin<Box<dyn futures::Stream<Item = kube::Result<WatchEvent<ResourceSlice>>> + Send>>;

async fn watch(api: &FakeApi, params: &WatchParams, from: &str) -> Events {
    slices(api).watch(params, from).await.unwrap().boxed()
}

/// The next event in short: `ADDED a`.
async fn next(events: &mut Events) -> String {
    let event = tokio::time::timeout(SOON, events.try_next())
        .await
        .unwrap()
        .unwrap();
    match event {
        Some(WatchEvent::Added(s)) => format!("ADDED {}", s.name_any()),
        Some(WatchEvent::Modified(s)) => format!("MODIFIED {}", s.name_any()),
        Some(WatchEvent::Deleted(s)) => format!("DELETED {}", s.name_any()),
        Some(WatchEvent::Bookmark(_)) => "BOOKMARK".into(),
        Some(WatchEvent::Error(e)) => format!("ERROR {}", e.code),
        None => "END".into(),
    }
}

#[tokio::test]
async fn a_watch_replays_and_then_follows_what_its_selector_chooses() {
    let api = FakeApi::new();
    api.put(&slice("a", "n")).unwrap();
    let params = WatchParams::default().fields("spec.nodeName=n");
    let mut events = watch(&api, &params, "0").await;
    assert_eq!(next(&mut events).await, "ADDED a");
    api.put(&slice("elsewhere", "m")).unwrap();
    api.put(&slice("b", "n")).unwrap();
    assert_eq!(next(&mut events).await, "ADDED b");
    api.modify::<ResourceSlice>("", "b", |s| s.spec.devices = None)
        .unwrap();
    assert_eq!(next(&mut events).await, "MODIFIED b");
    api.modify::<ResourceSlice>("", "b", |s| s.spec.node_name = Some("m".into()))
        .unwrap();
    assert_eq!(
        next(&mut events).await,
        "DELETED b",
        "leaving the selection looks like a deletion"
    );
    assert_eq!(api.wipe_slices("n", None), 1);
    assert_eq!(next(&mut events).await, "DELETED a");
    api.close_watches();
    assert_eq!(next(&mut events).await, "END");
}

#[tokio::test]
async fn an_expired_version_ends_a_watch_with_410_and_a_watcher_recovers() {
    let api = FakeApi::new();
    let old = api
        .put(&slice("a", "n"))
        .unwrap()
        .resource_version()
        .unwrap();
    let mut events = watch(&api, &WatchParams::default(), &old).await;
    let reflected = watcher(slices(&api), watcher::Config::default())
        .default_backoff()
        .applied_objects();
    let mut reflected = std::pin::pin!(reflected);
    assert_eq!(reflected.try_next().await.unwrap().unwrap().name_any(), "a");
    api.expire_watches();
    assert_eq!(next(&mut events).await, "ERROR 410");
    assert_eq!(next(&mut events).await, "END");
    let mut late = watch(&api, &WatchParams::default(), &old).await;
    assert_eq!(next(&mut late).await, "ERROR 410");
    api.put(&slice("b", "n")).unwrap();
    let found = async {
        // The watcher reports the 410 and then lists afresh: "a" comes again, and "b".
        while reflected
            .next()
            .await
            .unwrap()
            .map_or(true, |s| s.name_any() != "b")
        {}
    };
    tokio::time::timeout(SOON, found).await.unwrap();
}

#[tokio::test]
async fn a_streaming_list_ends_with_its_bookmark() {
    let api = FakeApi::new();
    api.put(&slice("a", "n")).unwrap();
    let config = watcher::Config::default().streaming_lists();
    let mut events = std::pin::pin!(watcher(slices(&api), config));
    let mut seen = Vec::new();
    for _ in 0..3 {
        let event = tokio::time::timeout(SOON, events.try_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        seen.push(match event {
            watcher::Event::Init => "init".to_owned(),
            watcher::Event::InitApply(s) => s.name_any(),
            watcher::Event::InitDone => "done".into(),
            other => format!("{other:?}"),
        });
    }
    assert_eq!(seen, ["init", "a", "done"]);
}

#[tokio::test]
async fn waiting_ends_with_the_condition_or_shows_the_last_requests() {
    let api = FakeApi::new();
    let waiting = api.wait_for(|view| view.get::<ResourceSlice>("", "a"), SOON);
    let (found, put) = tokio::join!(waiting, async { api.put(&slice("a", "n")).unwrap() });
    assert_eq!(found.unwrap(), put);
    slices(&api).get("a").await.unwrap();
    let never = api
        .wait_until(
            |view| view.count("get", "resourceslices") > 1,
            Duration::ZERO,
        )
        .await;
    assert_eq!(never.unwrap_err().requests, "get resourceslices a");
}
