//! A fake Kubernetes API server, in this process.
//!
//! Objects go through the typed form of `k8s-openapi`, so unknown fields vanish and wrong types are
//! refused, as on a real server; ResourceSlices and ResourceClaims are checked against the API's
//! limits. It lacks: authentication, admission, garbage collection by owner, graceful
//! pod deletion, JSON patches.

mod call;
mod claim_check;
mod custom;
mod defaults;
mod error;
mod faults;
mod gates;
mod http_server;
mod json;
mod kinds;
mod owners;
mod patch;
mod select;
mod service;
mod state;
mod store;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::resource::v1::ResourceSlice;
use tokio::sync::{Semaphore, watch as watch_channel};

pub use custom::{GpuNode, GpuPolicy};
pub use error::ApiError;
pub use faults::{Fault, Held};
pub use gates::Gate;
pub use http_server::HttpServer;
pub use kinds::Object;
pub use service::FakeBody;
pub use state::{Seen, View};

use faults::Effect;
use kinds::{Kind, Res};
use state::State;
use store::{Key, Preconditions};

/// The server. Clones are handles to the same one; it is also the tower service that
/// [`kube::Client::new`] takes.
#[derive(Debug, Clone, Default)]
pub struct FakeApi(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes watches and waiting conditions after every request and change.
    changed: watch_channel::Sender<()>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: watch_channel::Sender::new(()),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed.send_replace(());
    }
}

/// A condition did not come true in time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the condition on the fake API server did not hold within {timeout:?}; last requests: {requests}"
)]
pub struct WaitTimeout {
    /// Time that was waited.
    pub timeout: Duration,
    /// The last requests that the server saw, newest last.
    pub requests: String,
}

impl FakeApi {
    /// An empty server of version 1.37.1 with all gates on.
    pub fn new() -> Self {
        Self::default()
    }

    /// A client that calls the server directly, without a socket. Its default namespace is
    /// `default`. Must be called in a tokio runtime.
    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.clone(), "default")
    }

    /// Serves a custom resource.
    pub fn register<K: Object>(&self, namespaced: bool, status_subresource: bool) {
        let kind = Kind::of::<K>(namespaced, status_subresource);
        let mut state = self.0.lock();
        state.store.kinds.retain(|known| known.res != kind.res);
        state.store.kinds.push(kind);
    }

    /// Deletes the definition of a resource, and with it all its objects: requests for it get 404.
    pub fn unregister<K: Object>(&self) {
        let res = Res::of::<K>();
        let names: Vec<_> = self
            .list::<K>()
            .iter()
            .map(|object| object.meta().clone())
            .collect();
        for meta in names {
            let (namespace, name) = (
                meta.namespace.unwrap_or_default(),
                meta.name.unwrap_or_default(),
            );
            let _gone = self.delete::<K>(&namespace, &name);
        }
        let mut state = self.0.lock();
        state.store.kinds.retain(|known| known.res != res);
        state.epoch += 1;
        drop(state);
        self.0.wake();
    }

    /// Sets how far the server's clock is ahead of this machine's: in times of objects and dates
    /// of answers.
    pub fn set_clock_ahead(&self, ahead: SignedDuration) {
        self.0.lock().ahead = ahead;
    }

    /// Returns the time by the server's clock.
    pub fn time(&self) -> Timestamp {
        self.0.lock().time()
    }

    /// Sets what `/version` answers, e.g. `1.36.4`.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut self.0.lock().version);
    }

    /// Sets the answer of a pod through the server's proxy; `pod` is `NAME:PORT`, the path begins
    /// with `/`.
    pub fn put_behind_proxy(&self, namespace: &str, pod: &str, path: &str, text: &str) {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/proxy{path}");
        self.0.lock().behind_proxy.insert(path, text.to_owned());
    }

    // --- objects, above the API: no faults, no gates, no limits, nothing counted ---

    /// Creates or replaces an object with everything in it, status too.
    pub fn put<K: Object>(&self, object: &K) -> Result<K, ApiError> {
        let value = serde_json::to_value(object).map_err(|e| ApiError::new(400, e.to_string()))?;
        let name = object.meta().name.clone().unwrap_or_default();
        self.change::<K, _>(
            object.meta().namespace.as_deref().unwrap_or_default(),
            &name,
            |state, kind, key| {
                let now = state.now();
                let stored = state.store.put(kind, key, value, &now)?;
                serde_json::from_value(stored).map_err(|e| ApiError::new(500, e.to_string()))
            },
        )
    }

    /// Changes an object in place; status too.
    pub fn modify<K: Object>(
        &self,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut K),
    ) -> Result<K, ApiError> {
        let mut object = self
            .get::<K>(namespace, name)
            .ok_or_else(|| ApiError::not_found(&K::plural(&()), name))?;
        change(&mut object);
        self.put(&object)
    }

    /// Deletes an object, as some stranger would.
    pub fn delete<K: Object>(&self, namespace: &str, name: &str) -> Result<(), ApiError> {
        self.change::<K, _>(namespace, name, |state, kind, key| {
            let now = state.now();
            let any = Preconditions::default();
            state.store.delete(kind, key, &any, &now).map(drop)
        })
    }

    fn change<K: Object, T>(
        &self,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut State, &Kind, &Key) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let res = Res::of::<K>();
        let mut state = self.0.lock();
        let kind = state.store.kind(&res).ok_or_else(|| {
            ApiError::new(
                404,
                format!("{} is not served: register it first", K::kind(&())),
            )
        })?;
        let namespace = if kind.namespaced && namespace.is_empty() {
            "default"
        } else {
            namespace
        };
        let key = Key {
            res,
            namespace: namespace.into(),
            name: name.into(),
        };
        let result = change(&mut state, &kind, &key);
        drop(state);
        self.0.wake();
        result
    }

    /// Returns an object; the namespace is "" for cluster-scoped types.
    pub fn get<K: Object>(&self, namespace: &str, name: &str) -> Option<K> {
        View(&self.0.lock()).get(namespace, name)
    }

    /// All objects of a type, ordered by namespace and name.
    pub fn list<K: Object>(&self) -> Vec<K> {
        View(&self.0.lock()).list()
    }

    /// Waits until a condition holds, looking again after every request and change.
    pub async fn wait_until(
        &self,
        mut condition: impl FnMut(&View<'_>) -> bool,
        timeout: Duration,
    ) -> Result<(), WaitTimeout> {
        self.wait_for(|view| condition(view).then_some(()), timeout)
            .await
    }

    /// Waits until `look` finds something, and returns it.
    pub async fn wait_for<T>(
        &self,
        mut look: impl FnMut(&View<'_>) -> Option<T>,
        timeout: Duration,
    ) -> Result<T, WaitTimeout> {
        let mut found = None;
        let wait = self.until(|state| {
            found = look(&View(state));
            found.is_some()
        });
        let in_time = tokio::time::timeout(timeout, wait).await;
        match (in_time, found) {
            (Ok(()), Some(found)) => Ok(found),
            _ => Err(WaitTimeout {
                timeout,
                requests: self.last_requests(),
            }),
        }
    }

    fn last_requests(&self) -> String {
        let requests = View(&self.0.lock()).requests();
        let last = requests.iter().rev().take(12).rev();
        last.map(|s| format!("{} {} {}", s.verb, s.resource, s.name))
            .collect::<Vec<_>>()
            .join(", ")
    }

    async fn until(&self, mut condition: impl FnMut(&State) -> bool) {
        let mut wake = self.0.changed.subscribe();
        loop {
            // Marked as seen before looking, so that a change after the look wakes us.
            wake.borrow_and_update();
            if condition(&self.0.lock()) {
                return;
            }
            if wake.changed().await.is_err() {
                return;
            }
        }
    }

    // --- requests ---

    /// Counts requests that arrived with this verb for this resource (`resourceclaims/status` for a
    /// subresource); `*` stands for any.
    pub fn count(&self, verb: &str, resource: &str) -> u64 {
        View(&self.0.lock()).count(verb, resource)
    }

    /// Starts counting afresh.
    pub fn forget_requests(&self) {
        self.0.lock().forget_requests();
    }

    // --- faults ---

    /// The next `times` requests of this verb and resource (`*` for any) meet a fault.
    pub fn fail_next(&self, times: usize, verb: &str, resource: &str, fault: Fault) {
        self.0
            .lock()
            .faults
            .add(verb, resource, times, Effect::Fault(fault));
    }

    /// All requests of this verb and resource wait until the returned guard is dropped, and then go
    /// on.
    pub fn hold(&self, verb: &str, resource: &str) -> Held {
        let gate = Arc::new(Semaphore::new(0));
        self.0
            .lock()
            .faults
            .add(verb, resource, usize::MAX, Effect::Hold(gate.clone()));
        Held(gate)
    }

    /// Forgets the faults that have not happened yet.
    pub fn clear_faults(&self) {
        self.0.lock().faults.clear();
    }

    /// Turns a feature gate off: its fields vanish from what is written from now on.
    pub fn turn_off(&self, gate: Gate) {
        self.0.lock().store.gates_off.insert(gate);
    }

    /// Deletes the ResourceSlices of a node, as the kubelet does when it starts (`driver` `None`)
    /// or when a driver stays away. Returns how many there were.
    pub fn wipe_slices(&self, node: &str, driver: Option<&str>) -> usize {
        let doomed: Vec<ResourceSlice> = self
            .list::<ResourceSlice>()
            .into_iter()
            .filter(|slice| slice.spec.node_name.as_deref() == Some(node))
            .filter(|slice| driver.is_none_or(|driver| slice.spec.driver == driver))
            .collect();
        let gone = |slice: &&ResourceSlice| {
            self.delete::<ResourceSlice>("", slice.metadata.name.as_deref().unwrap_or_default())
                .is_ok()
        };
        doomed.iter().filter(gone).count()
    }

    /// Forgets the history: open watches end with 410, and so do those that resume from an old
    /// version.
    pub fn expire_watches(&self) {
        self.0.lock().store.compact();
        self.0.wake();
    }

    /// The server's watch cache falls behind, as it may: gets and lists with `resourceVersion=0`
    /// are answered with what there is now, until it keeps up again. All others stay consistent.
    pub fn freeze_cache(&self, frozen: bool) {
        self.0.lock().store.freeze_cache(frozen);
    }

    /// Ends all open watches cleanly, as a server does from time to time.
    pub fn close_watches(&self) {
        self.0.lock().epoch += 1;
        self.0.wake();
    }

    /// Stops the server: connections are refused, open watches and hanging requests break. The
    /// objects stay.
    pub fn stop(&self) {
        let mut state = self.0.lock();
        state.running = false;
        state.epoch += 1;
        drop(state);
        self.0.wake();
    }

    /// Starts it again.
    pub fn start(&self) {
        self.0.lock().running = true;
        self.0.wake();
    }
}
