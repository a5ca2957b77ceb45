//! A second node of a cluster, for the cases that need one.

use anyhow::Result;
use serde_json::json;

use super::{Cluster, state_dir};
use crate::api::at;
use crate::options::{Extent, Gates, Options};
use crate::process::output;

impl Cluster {
    /// Adds another node, which is gone with the value that stands for it: its files, programs and
    /// images are its own, its objects are those of this cluster.
    pub fn second_node(&self) -> Result<Self> {
        let options = Options {
            name: format!("{}-2", self.name),
            version: self.parts.version().to_owned(),
            owned: true,
            extent: Extent::Node,
            gates: Gates::Default,
        };
        let layout = self
            .layout
            .second(&options.name, &state_dir(&options.name)?);
        Self::create(&options, layout, |second| {
            self.namespaces.connect(&second.namespaces)?;
            for (here, there) in [(self, &*second), (&*second, self)] {
                let route = [
                    "route",
                    "replace",
                    there.layout.pods(),
                    "via",
                    there.layout.address(),
                ];
                output(&mut here.command("ip", &route))?;
            }
            second.start(options.extent, options.gates)
        })
    }

    /// Removes the objects of a node that is no more: by itself the cluster would take minutes.
    pub(super) fn forget(&self) -> Result<()> {
        let api = self.api();
        let here = format!("fieldSelector=spec.nodeName={}", self.layout.node());
        for pod in api.list(&format!("/api/v1/pods?{here}"))? {
            let part = |name| at(&pod, name).as_str().unwrap_or_default();
            let path = format!(
                "/api/v1/namespaces/{}/pods/{}",
                part("metadata.namespace"),
                part("metadata.name")
            );
            api.delete(&path, &json!({"gracePeriodSeconds": 0}))?;
        }
        api.delete(&format!("/api/v1/nodes/{}", self.layout.node()), &json!({}))
    }
}
