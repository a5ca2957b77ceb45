//! The executor's view of the API server: is a claim still there, and what does it have allocated?

use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::{Naming, attributes};
use divvy_claims::{Claim, ClaimRef};
use divvy_executor::{ClaimsApi, Clock, Lookup, SystemClock};
use divvy_model::{ClaimUid, DeviceKind, GpuUuid};
use divvy_telemetry::Counter;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::runtime::Handle;

use crate::claims::claim::current;
use crate::claims::fetch::ClaimFetcher;

/// Looks claims up for the executor's threads.
pub(crate) struct KubeClaims {
    pub(crate) fetcher: Arc<ClaimFetcher>,
    pub(crate) client: Client,
    pub(crate) driver: String,
    /// This node.
    pub(crate) node: String,
    /// The pool of this node: a device of another node's pool is not ours to hold.
    pub(crate) pool: String,
    pub(crate) runtime: Handle,
    /// Counts lost files of GPU numbers.
    pub(crate) numbers_lost: Counter,
}

impl ClaimsApi for KubeClaims {
    fn look_up(&self, uid: &ClaimUid, name: Option<&ClaimRef>, until: Duration) -> Lookup {
        // The executor's deadlines are times since boot; tokio's timers have a clock of their own.
        let left = until.saturating_sub(SystemClock.now());
        if let Some(claim) = name {
            return match self.fetcher.look(claim, left) {
                Ok(found) => self.judge(uid, found),
                Err(error) => Lookup::Unknown(error),
            };
        }
        // The executor's threads are blocking ones, so this holds up no other claim.
        match self
            .runtime
            .block_on(tokio::time::timeout(left, self.list()))
        {
            Ok(Ok(all)) => {
                let is = |c: &ResourceClaim| c.metadata.uid.as_deref() == Some(uid.as_str());
                self.judge(uid, all.into_iter().find(is))
            }
            Ok(Err(error)) => Lookup::Unknown(crate::chain(&error)),
            Err(_late) => Lookup::Unknown("the API server did not answer in time".to_owned()),
        }
    }

    fn published_numbers(&self) -> Result<Vec<(u32, GpuUuid)>, String> {
        let ours = format!("spec.driver={},spec.nodeName={}", self.driver, self.node);
        let slices = Api::<ResourceSlice>::all(self.client.clone());
        let selected = ListParams::default().fields(&ours);
        let slices = self.ask(async { Ok(slices.list(&selected).await?.items) })?;
        // NVIDIA's driver has a pool of the same driver here, where we stand in for it.
        let devices = slices
            .into_iter()
            .filter(|slice| slice.spec.pool.name == self.pool)
            .filter_map(|slice| slice.spec.devices)
            .flatten();
        let naming = Naming::of(&self.driver);
        let number = |device: Device| {
            let name = naming.attribute(attributes::GPU_UUID);
            let gpu = device.attributes?.remove(&*name)?.string?;
            Some((number(&device.name)?, gpu.parse().ok()?))
        };
        Ok(devices.filter_map(number).collect())
    }

    fn allocated_numbers(&self) -> Result<Vec<u32>, String> {
        let claims = self.ask(self.list())?;
        // Asked only for a file that is lost or damaged, so this is the place to count it.
        self.numbers_lost.inc();
        let results = claims
            .into_iter()
            .filter_map(|c| c.status?.allocation?.devices?.results)
            .flatten();
        let ours =
            results.filter(|result| result.driver == self.driver && result.pool == self.pool);
        Ok(ours.filter_map(|result| number(&result.device)).collect())
    }
}

/// The number in a device's name.
fn number(device: &str) -> Option<u32> {
    Some(DeviceKind::parse(&device.parse().ok()?).ok()?.ordinal())
}

impl KubeClaims {
    /// Waits for an answer as one of the executor's threads.
    fn ask<T>(&self, question: impl Future<Output = Result<T, kube::Error>>) -> Result<T, String> {
        self.runtime
            .block_on(question)
            .map_err(|error| crate::chain(&error))
    }

    fn judge(&self, uid: &ClaimUid, found: Option<ResourceClaim>) -> Lookup {
        match found.and_then(|object| self.ours(object)) {
            // The UID decides, since a name may have been given to another claim.
            Some((is, claim)) if is == *uid => Lookup::Found(Box::new(claim)),
            // Deleted, made again under the same name, or deallocated.
            _ => Lookup::Gone,
        }
    }

    /// An allocated claim with those of its devices that are ours and on this node.
    pub(crate) fn ours(&self, object: ResourceClaim) -> Option<(ClaimUid, Claim)> {
        let mut claim = current(object, &self.driver)?;
        claim
            .allocation
            .results
            .retain(|result| result.pool == self.pool);
        Some((claim.uid.clone(), claim))
    }

    /// All claims of the cluster, only asked for when something is wrong. They are as of now, not
    /// as of a cache of the API server has them: a live claim that is missing there would count as
    /// gone.
    pub(crate) async fn list(&self) -> Result<Vec<ResourceClaim>, kube::Error> {
        Ok(Api::<ResourceClaim>::all(self.client.clone())
            .list(&ListParams::default())
            .await?
            .items)
    }
}

#[cfg(test)]
mod tests {
    use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
    use divvy_fake_cluster::{FakeApi, Fault};

    use super::*;
    use crate::claims::fetch::Connect;

    /// The view of an API server, of which one attempt may take `each`.
    fn claims(api: &FakeApi, each: Duration) -> KubeClaims {
        let (client, driver) = (api.client(), "gpu.divvy.dev");
        let fetcher = Arc::new(ClaimFetcher::new(Connect::Shared(client.clone()), each));
        KubeClaims {
            fetcher,
            client,
            driver: driver.to_owned(),
            node: "n1".to_owned(),
            pool: "n1/divvy".to_owned(),
            runtime: Handle::current(),
            numbers_lost: Counter::default(),
        }
    }

    #[tokio::test]
    async fn a_claim_that_a_lagging_cache_does_not_have_is_not_gone() {
        let (api, driver) = (FakeApi::new(), "gpu.divvy.dev");
        let claims = Arc::new(claims(&api, Duration::from_secs(10)));
        api.freeze_cache(true);
        let results = vec![mk_result("gpu", driver, "n1/divvy", "gpu-0")];
        let stored = api
            .put(&allocated(mk_claim("default", "c", driver, 1), results))
            .unwrap();
        let uid: ClaimUid = stored.metadata.uid.unwrap().parse().unwrap();
        let named = ClaimRef {
            uid: uid.clone(),
            namespace: "default".to_owned(),
            name: "c".to_owned(),
        };
        let look = move |name: Option<ClaimRef>| {
            let (claims, uid) = (claims.clone(), uid.clone());
            let until = SystemClock.now() + Duration::from_secs(10);
            tokio::task::spawn_blocking(move || claims.look_up(&uid, name.as_ref(), until))
        };
        for name in [None, Some(named)] {
            let found = look(name.clone()).await.unwrap();
            assert!(matches!(found, Lookup::Found(_)), "{name:?}: {found:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_look_at_a_claim_ends_in_time_although_the_server_does_not_answer() {
        let api = FakeApi::new();
        let claims = claims(&api, Duration::from_hours(1));
        api.fail_next(10, "get", "resourceclaims", Fault::Hang);
        let uid: ClaimUid = "uid-c".parse().unwrap();
        let named = ClaimRef {
            uid: uid.clone(),
            namespace: "default".to_owned(),
            name: "c".to_owned(),
        };
        let until = SystemClock.now() + Duration::from_millis(100);
        let found = tokio::task::spawn_blocking(move || claims.look_up(&uid, Some(&named), until));
        let found = tokio::time::timeout(Duration::from_mins(1), found)
            .await
            .unwrap()
            .unwrap();
        assert!(matches!(found, Lookup::Unknown(_)), "{found:?}");
    }
}
