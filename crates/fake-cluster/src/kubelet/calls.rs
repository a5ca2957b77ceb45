//! Prepare and unprepare.

use std::collections::BTreeMap;

use divvy_proto::dra::v1;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use super::{FakeKubelet, KubeletError, Plugin};

/// Names a claim to the plugin.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl ClaimRef {
    /// A reference from its parts.
    pub fn new(namespace: &str, name: &str, uid: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        }
    }
}

/// The answers of one prepare call by claim UID: devices, or the claim's error.
pub type Prepared = BTreeMap<String, Result<Vec<v1::Device>, String>>;

impl FakeKubelet {
    /// Calls NodePrepareResources of a driver, and checks that exactly the claims asked for are
    /// answered.
    pub async fn prepare(
        &self,
        driver: &str,
        claims: &[ClaimRef],
    ) -> Result<Prepared, KubeletError> {
        const METHOD: &str = "NodePrepareResources";
        let (_, channel) = self.channel(driver)?;
        let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
        let request = self.request(v1::NodePrepareResourcesRequest {
            claims: claims.iter().map(claim).collect(),
        });
        let answer = self
            .within(driver, METHOD, client.node_prepare_resources(request))
            .await?
            .claims;
        let answer = answer
            .into_iter()
            .map(|(uid, one)| (uid, outcome(one.devices, one.error)))
            .collect();
        check(driver, METHOD, claims, answer)
    }

    /// Calls NodeUnprepareResources of a driver; the answers by claim UID.
    pub async fn unprepare(
        &self,
        driver: &str,
        claims: &[ClaimRef],
    ) -> Result<BTreeMap<String, Result<(), String>>, KubeletError> {
        const METHOD: &str = "NodeUnprepareResources";
        let (_, channel) = self.channel(driver)?;
        let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
        let request = self.request(v1::NodeUnprepareResourcesRequest {
            claims: claims.iter().map(claim).collect(),
        });
        let answer = self
            .within(driver, METHOD, client.node_unprepare_resources(request))
            .await?
            .claims;
        let answer = answer
            .into_iter()
            .map(|(uid, one)| (uid, outcome((), one.error)))
            .collect();
        check(driver, METHOD, claims, answer)
    }

    pub(super) fn channel(&self, driver: &str) -> Result<(Plugin, Channel), KubeletError> {
        let plugin = self.shared.lock().registry.instance(driver);
        let missing = || KubeletError::NotRegistered {
            driver: driver.into(),
            refused: self.refused(),
        };
        let plugin = plugin.ok_or_else(missing)?;
        let endpoint =
            Endpoint::from_shared(format!("unix:{}", plugin.endpoint)).map_err(|source| {
                KubeletError::Endpoint {
                    driver: driver.into(),
                    endpoint: plugin.endpoint.clone(),
                    source,
                }
            })?;
        Ok((plugin, endpoint.connect_lazy()))
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.config().deadline);
        request
    }

    async fn within<T>(
        &self,
        driver: &str,
        method: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, KubeletError> {
        let deadline = self.config().deadline;
        let late = || KubeletError::Deadline {
            driver: driver.into(),
            method,
            deadline,
        };
        let started = tokio::time::Instant::now();
        match tokio::time::timeout(deadline, call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            // The deadline also travels with the request, and either side may notice first.
            Ok(Err(status))
                if matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded)
                    && started.elapsed() >= deadline =>
            {
                Err(late())
            }
            Ok(Err(status)) => Err(KubeletError::Call {
                driver: driver.into(),
                method,
                status: Box::new(status),
            }),
            Err(_) => Err(late()),
        }
    }
}

fn claim(claim: &ClaimRef) -> v1::Claim {
    v1::Claim {
        namespace: claim.namespace.clone(),
        uid: claim.uid.clone(),
        name: claim.name.clone(),
    }
}

fn outcome<T>(value: T, error: String) -> Result<T, String> {
    if error.is_empty() {
        Ok(value)
    } else {
        Err(error)
    }
}

fn check<T>(
    driver: &str,
    method: &'static str,
    claims: &[ClaimRef],
    answer: BTreeMap<String, T>,
) -> Result<BTreeMap<String, T>, KubeletError> {
    let mut asked: Vec<String> = claims.iter().map(|claim| claim.uid.clone()).collect();
    asked.sort_unstable();
    asked.dedup();
    let answered: Vec<String> = answer.keys().cloned().collect();
    if asked == answered {
        Ok(answer)
    } else {
        Err(KubeletError::Mismatch {
            driver: driver.into(),
            method,
            asked,
            answered,
        })
    }
}
