//! gRPC contracts between the kubelet and the node plugin, and between that and the MPS supervisor:
//! messages, clients and servers, generated from the files in `protos/`. Called by
//! the node plugin's gRPC adapters, and by the fake kubelet; no other crate should see these types.
//!
//! The service paths on the wire come from the protocol packages, not from the module names here.

macro_rules! generated {
    ($(#[$doc:meta])* $module:ident, $file:literal) => {
        $(#[$doc])*
        #[allow(
            missing_docs,
            unreachable_pub,
            clippy::all,
            clippy::pedantic,
            clippy::allow_attributes_without_reason,
            reason = "generated code"
        )]
        pub mod $module {
            include!(concat!("../generated/", $file));
        }
    };
}

generated!(
    /// Plugin registration, v1 (`pluginregistration.Registration`).
    registration,
    "registration.rs"
);

/// The DRA plugin service.
pub mod dra {
    generated!(
        /// Kubernetes 1.34 and later (`k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin`).
        v1,
        "dra_v1.rs"
    );

    /// The plugin type in [`PluginInfo`](crate::registration::PluginInfo).
    pub const PLUGIN_TYPE: &str = "DRAPlugin";
    /// Short name of the service for `supported_versions`.
    pub const SERVICE: &str = "v1.DRAPlugin";
}

/// Health of devices, in the versions that kubelets know; served beside the DRA service.
pub mod health {
    generated!(
        /// Kubernetes 1.37 and later (`v1.DRAResourceHealth`).
        v1,
        "dra_health_v1.rs"
    );

    generated!(
        /// Kubernetes 1.34 and later (`v1alpha1.DRAResourceHealth`), with the messages of v1; goes
        /// with 1.40.
        v1alpha1,
        "dra_health_v1alpha1.rs"
    );

    /// Short names of the services for `supported_versions`, listed after those of
    /// [`dra`](crate::dra).
    pub const SERVICES: [&str; 2] = ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
}

/// The devices of running pods, as the kubelet lists them.
pub mod podresources {
    generated!(
        /// Version 1 (`v1.PodResourcesLister`).
        v1,
        "podresources_v1.rs"
    );
}

/// The supervisor of MPS daemons, which the node plugin asks.
pub mod mps {
    generated!(
        /// Version 1 (`divvy.mps.v1.Supervisor`).
        v1,
        "mps_supervisor_v1.rs"
    );
}

/// Device plugins, which give devices out beside DRA: for the stand-in of one in the end-to-end
/// tests.
pub mod deviceplugin {
    generated!(
        /// Version 1beta1, the only one (`v1beta1.Registration`, `v1beta1.DevicePlugin`).
        v1beta1,
        "deviceplugin_v1beta1.rs"
    );
}

#[cfg(test)]
mod tests;
