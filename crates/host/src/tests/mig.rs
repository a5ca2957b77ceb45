//! Capabilities of partitions.

use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};

use super::{chain, host, pci, two_gpus, write};
use crate::*;

const GI: GpuInstanceId = GpuInstanceId(9);
const CI: ComputeInstanceId = ComputeInstanceId(0);

fn cap(minor: u32) -> DeviceNode {
    let info = NodeInfo {
        major: 507,
        minor,
        mode: 0o444,
        gid: 0,
    };
    DeviceNode {
        path: format!("/dev/nvidia-caps/nvidia-cap{minor}"),
        info,
    }
}

#[test]
fn proc_decides_the_minors_even_where_they_differ_from_those_computed() {
    let (made, _dir) = host(&two_gpus());
    made.mig_access(3, 9, 0, (489, 490)).unwrap();
    let nodes = mig_nodes(&made.host, &DeviceNodes::Real, 3, GI, CI).unwrap();
    assert_eq!(
        nodes,
        MigNodes {
            gpu_instance: cap(489),
            compute_instance: cap(490),
            as_expected: true
        }
    );
    assert_eq!(capability_minor(3, GI, None), 489);

    made.mig_access(3, 9, 0, (12, 700)).unwrap();
    let nodes = mig_nodes(&made.host, &made.nodes, 3, GI, CI).unwrap();
    assert_eq!(
        nodes,
        MigNodes {
            gpu_instance: cap(12),
            compute_instance: cap(700),
            as_expected: false
        }
    );
}

#[test]
fn without_the_file_only_a_simulated_host_computes_the_minors() {
    let (made, _dir) = host(&two_gpus());
    let nodes = mig_nodes(&made.host, &made.nodes, 0, GpuInstanceId(1), CI).unwrap();
    assert_eq!(
        nodes,
        MigNodes {
            gpu_instance: cap(12),
            compute_instance: cap(13),
            as_expected: true
        }
    );
    let error = mig_nodes(&made.host, &DeviceNodes::Real, 0, GpuInstanceId(1), CI).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the MIG instance has no capability: /proc/driver/nvidia/capabilities/gpu0/mig/gi1/access does not exist (check that the host's /proc is mounted and that the instance exists)"
    );
}

#[test]
fn a_damaged_file_and_a_missing_module_are_different_errors() {
    let (made, dir) = host(&two_gpus());
    made.mig_access(0, 1, 0, (12, 13)).unwrap();
    write(
        dir.path(),
        "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access",
        b"DeviceFileMinor: x\n",
    );
    let error = mig_nodes(&made.host, &made.nodes, 0, GpuInstanceId(1), CI).unwrap_err();
    assert!(
        chain(&error)
            .ends_with("a MIG capability is not of the expected form: \"DeviceFileMinor: x\\n\""),
        "{}",
        chain(&error)
    );
    write(
        dir.path(),
        "proc/devices",
        b"Character devices:\n195 nvidia\n",
    );
    let error = mig_nodes(&made.host, &made.nodes, 0, GpuInstanceId(2), CI).unwrap_err();
    assert!(
        error.to_string().contains("no entry for nvidia-caps"),
        "{error}"
    );
}

/// A partition gets its GPUs node and its two capabilities and drm nodes only for graphics.
#[test]
fn a_partition_gets_its_gpus_node_and_its_two_capabilities() {
    let (made, _dir) = host(&two_gpus());
    let gpu = gpu_nodes(&made.host, &made.nodes, 0, pci("0000:07:00.0")).unwrap();
    let partition = mig_nodes(&made.host, &made.nodes, 0, GpuInstanceId(1), CI).unwrap();
    let mut expected = divvy_cdi::ContainerEdits::default();
    expected
        .device_nodes
        .extend([&gpu.main, &cap(12), &cap(13)].map(Into::into));
    assert_eq!(partition_edits(&gpu, &partition, false), expected);
    expected.device_nodes.extend(gpu.drm.iter().map(Into::into));
    assert_eq!(partition_edits(&gpu, &partition, true), expected);
}
