//! gRPC contracts between the kubelet and the node plugin: messages, clients and servers, generated at build time
//! from the files in `protos/`. Called by the node plugin's gRPC adapters, and by the fake kubelet; no other crate
//! should see these types.
//!
//! The service paths on the wire come from the protocol packages, not from the module names here.

macro_rules! generated {
    ($folder:literal, $package:literal) => {
        include!(concat!(env!("OUT_DIR"), "/", $folder, "/", $package, ".rs"));
    };
}

/// Plugin registration, v1 (`pluginregistration.Registration`).
#[allow(missing_docs, unreachable_pub, reason = "generated code")]
#[allow(clippy::all, clippy::pedantic, clippy::allow_attributes_without_reason, reason = "generated code")]
pub mod registration {
    generated!("registration", "pluginregistration");
}

/// The DRA plugin service, in the versions that the kubelet may pick.
pub mod dra {
    /// Kubernetes 1.34 and later (`k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin`).
    #[allow(missing_docs, unreachable_pub, reason = "generated code")]
    #[allow(
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1 {
        generated!("dra_v1", "k8s.io.kubelet.pkg.apis.dra.v1");
    }

    /// Kubernetes 1.32 and later (`k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin`); no shares.
    #[allow(missing_docs, unreachable_pub, reason = "generated code")]
    #[allow(
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1beta1 {
        generated!("dra_v1beta1", "k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }

    /// The plugin type in [`PluginInfo`](crate::registration::PluginInfo).
    pub const PLUGIN_TYPE: &str = "DRAPlugin";
    /// Short names of the services for `supported_versions`, best first: the kubelet takes the first it knows.
    pub const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
}

/// How devices are, in the versions that kubelets know; served beside the DRA service.
pub mod health {
    /// Kubernetes 1.37 and later (`v1.DRAResourceHealth`).
    #[allow(missing_docs, unreachable_pub, reason = "generated code")]
    #[allow(
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1 {
        generated!("dra_health_v1", "v1");
    }

    /// Kubernetes 1.34 and later (`v1alpha1.DRAResourceHealth`); goes with 1.40.
    #[allow(missing_docs, unreachable_pub, reason = "generated code")]
    #[allow(
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1alpha1 {
        generated!("dra_health_v1alpha1", "v1alpha1");
    }

    /// Short names of the services for `supported_versions`, to be told after those of [`dra`](crate::dra).
    pub const SERVICES: [&str; 2] = ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
}

/// What running pods hold, as the kubelet tells it.
pub mod podresources {
    /// Version 1 (`v1.PodResourcesLister`).
    #[allow(missing_docs, unreachable_pub, reason = "generated code")]
    #[allow(
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1 {
        generated!("podresources_v1", "v1");
    }
}

/// Device plugins, which give devices out beside DRA: for the stand-in of one in the end-to-end tests.
pub mod deviceplugin {
    /// Version 1beta1, the only one (`v1beta1.Registration`, `v1beta1.DevicePlugin`).
    #[allow(missing_docs, unreachable_pub, reason = "generated code")]
    #[allow(
        clippy::all,
        clippy::pedantic,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1beta1 {
        generated!("deviceplugin_v1beta1", "v1beta1");
    }
}

#[cfg(test)]
mod tests;
