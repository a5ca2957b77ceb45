//! Readings of use through NVML's C ABI, from the mock library.

use std::time::{Duration, Instant};

use divvy_gpu_sim::Fault;
use divvy_model::mig::{ComputeInstanceProfileId, GpuInstanceProfileId, Placement};
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, GpuProcess, GpuUuid, MigDevice, ProcessSample};

use crate::NvmlDriver;
use crate::ffi::trial::WRITES_NOTHING;
use crate::test_library::TestLibrary;

const GIB: u64 = 1 << 30;
/// `1g.10gb` of an H100.
const SMALLEST: GpuInstanceProfileId = GpuInstanceProfileId(19);

/// Makes a partition at the first memory slice.
fn cut(driver: &NvmlDriver, gpu: &GpuUuid) -> MigDevice {
    let placement = Placement { start: 0, size: 1 };
    let instance = driver
        .create_gpu_instance(gpu, SMALLEST, placement)
        .unwrap();
    let whole = driver
        .compute_profiles(gpu, instance.id)
        .unwrap()
        .first()
        .unwrap()
        .id;
    let made = driver
        .create_compute_instance(gpu, instance.id, ComputeInstanceProfileId(whole.0))
        .unwrap();
    MigDevice {
        gpu_instance: instance.id,
        uuid: made.uuid,
    }
}

/// Asks until there is something to compare with.
fn measured(driver: &NvmlDriver, gpu: &GpuUuid, part: Option<&MigDevice>) -> f64 {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(percent) = driver.sm_utilization(gpu, part).unwrap() {
            return percent;
        }
        assert!(Instant::now() < until, "never anything to compare with");
    }
}

#[test]
fn memory_is_that_of_the_gpu_or_of_its_partition() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let whole = driver.memory(&gpu, None).unwrap();
    assert_eq!(
        (whole.used, whole.reserved, Some(whole.total)),
        (0, 0, driver.facts(&gpu).unwrap().memory_bytes)
    );

    driver.set_mig_mode(&gpu, true).unwrap();
    let part = cut(&driver, &gpu);
    let inside = GpuProcess::new(7, Some(part.gpu_instance.0));
    let use_it = |e: &mut divvy_gpu_sim::Engine| {
        let found = e.gpu(&gpu).unwrap();
        found.processes.insert(inside);
        (found.usage.reserved_bytes, found.usage.other_bytes) = (2 * GIB, GIB);
        e.set_usage(&gpu, 7, Some(3 * GIB), 0);
    };
    library.state.edit(use_it).unwrap();
    let (of_part, of_gpu) = (
        driver.memory(&gpu, Some(&part)).unwrap(),
        driver.memory(&gpu, None).unwrap(),
    );
    assert_eq!((of_part.used, of_part.total >> 20), (3 * GIB, 9984));
    assert_eq!((of_gpu.used, of_gpu.reserved), (4 * GIB, 2 * GIB));
    let gone = MigDevice {
        uuid: "MIG-00000000-0000-0000-0000-000000000000".parse().unwrap(),
        ..part
    };
    assert_eq!(
        driver.memory(&gpu, Some(&gone)).unwrap_err().code,
        GpuErrorCode::NOT_FOUND
    );
}

#[test]
fn what_processes_compute_is_read_once_and_nothing_is_no_error() {
    let library = TestLibrary::new("l4x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    assert_eq!(driver.process_utilization(&gpu, 0).unwrap(), []);
    assert_eq!(driver.utilization(&gpu).unwrap(), 0);

    // More than the ring holds: the oldest are gone.
    let sample = |at: u64| ProcessSample {
        pid: 8,
        at,
        percent: 4711,
    };
    let busy = |e: &mut divvy_gpu_sim::Engine| {
        let found = e.gpu(&gpu).unwrap();
        found
            .processes
            .extend([GpuProcess::new(7, None), GpuProcess::new(9, None)]);
        found.usage.samples = (1..=100).map(sample).collect();
        e.set_usage(&gpu, 7, None, 30);
        e.set_usage(&gpu, 9, None, 90);
    };
    library.state.edit(busy).unwrap();
    let all = driver.process_utilization(&gpu, 0).unwrap();
    assert_eq!(
        (
            all.len(),
            all.iter().filter(|s| s.pid == 8).map(|s| s.at).min()
        ),
        (72, Some(31))
    );
    let later = driver.process_utilization(&gpu, 100).unwrap();
    assert_eq!(
        later.iter().map(|s| (s.pid, s.percent)).collect::<Vec<_>>(),
        [(7, 30), (9, 90)]
    );
    assert_eq!(driver.utilization(&gpu).unwrap(), 100);
    // A process that has ended.
    library.state.edit(|e| e.end_process(9)).unwrap();
    assert_eq!(driver.process_utilization(&gpu, 100).unwrap().len(), 1);
}

#[test]
fn multiprocessors_are_measured_on_hopper_and_for_each_partition() {
    let library = TestLibrary::new("a100-40x1,h100x1");
    let [ampere, hopper] = <[GpuUuid; 2]>::try_from(library.uuids()).unwrap();
    let driver = library.open();
    assert_eq!(
        driver.sm_utilization(&ampere, None).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    assert_eq!(driver.sm_utilization(&hopper, None).unwrap(), None);
    assert_eq!(
        measured(&driver, &hopper, None).to_bits(),
        0.0_f64.to_bits()
    );

    driver.set_mig_mode(&hopper, true).unwrap();
    assert_eq!(
        driver.utilization(&hopper).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    assert_eq!(
        driver.process_utilization(&hopper, 0).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    let first = cut(&driver, &hopper);
    let busy = |e: &mut divvy_gpu_sim::Engine| {
        e.gpu(&hopper)
            .unwrap()
            .processes
            .insert(GpuProcess::new(7, Some(first.gpu_instance.0)));
        e.set_usage(&hopper, 7, None, 55);
    };
    library.state.edit(busy).unwrap();
    assert_eq!(driver.sm_utilization(&hopper, Some(&first)).unwrap(), None);
    assert!((measured(&driver, &hopper, Some(&first)) - 55.0).abs() < 0.01);

    library.state.edit(|e| e.end_process(7)).unwrap();
    driver
        .destroy_compute_instance(
            &hopper,
            first.gpu_instance,
            divvy_model::mig::ComputeInstanceId(0),
        )
        .unwrap();
    driver
        .destroy_gpu_instance(&hopper, first.gpu_instance)
        .unwrap();
    let second = cut(&driver, &hopper);
    assert_eq!(
        (second.gpu_instance, second.uuid == first.uuid),
        (first.gpu_instance, false)
    );
    assert_eq!(
        driver.sm_utilization(&hopper, Some(&second)).unwrap(),
        None,
        "the sample of another instance"
    );
    assert!(measured(&driver, &hopper, Some(&second)).abs() < 0.01);
}

#[test]
fn a_failed_sample_keeps_no_other_gpu_from_being_measured() {
    let library = TestLibrary::new("h100x2");
    let uuids = library.uuids();
    let driver = library.open();
    let fault = Fault::fail(GpuErrorCode::UNKNOWN)
        .of(GpuOp::SmUtilization)
        .on(&uuids[0]);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    for _ in 0..3 {
        assert_eq!(
            driver.sm_utilization(&uuids[0], None).unwrap_err().code,
            GpuErrorCode::UNKNOWN
        );
    }
    measured(&driver, &uuids[1], None);
    library.state.edit(|e| e.clear_faults(None)).unwrap();
    measured(&driver, &uuids[0], None);
}

#[test]
fn a_sample_is_compared_only_with_one_that_is_not_too_old() {
    let compares = "nvmlGpmMetricsGet";
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let trial = &driver.library.trial;
    let measure_after = |seconds| {
        driver.gpm.age(Duration::from_secs(seconds));
        // The library itself sees two samples of the same moment.
        trial.fail_once_in(compares, 0, WRITES_NOTHING);
        driver.sm_utilization(&gpu, None).unwrap().is_some()
    };
    assert!(!measure_after(0));
    let measured = [60, 200, 60].map(measure_after);
    assert_eq!(measured, [true, false, true]);
    assert_eq!(trial.calls(compares), 2);
    assert_eq!(buffers(&driver), 1, "the last sample");
}

/// Counts the buffers of samples that were not given back.
fn buffers(driver: &NvmlDriver) -> usize {
    let calls = |function| driver.library.trial.calls(function);
    calls("nvmlGpmSampleAlloc") - calls("nvmlGpmSampleFree")
}

#[test]
fn a_sample_that_cannot_be_taken_or_compared_leaves_no_buffer_behind() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let fail = |function| {
        let trial = &driver.library.trial;
        trial.fail_once_in(function, 0, GpuErrorCode::UNKNOWN);
        driver.sm_utilization(&gpu, None).unwrap_err();
    };
    for _ in 0..3 {
        fail("nvmlGpmSampleGet");
        assert_eq!(buffers(&driver), 0);
    }
    assert_eq!(driver.sm_utilization(&gpu, None).unwrap(), None);
    driver.gpm.age(Duration::from_secs(1));
    fail("nvmlGpmMetricsGet");
    assert_eq!(buffers(&driver), 1, "the one to compare with next");
    driver.gpm.age(Duration::from_secs(1));
    fail("nvmlGpmSampleGet");
    assert_eq!(buffers(&driver), 0);
}
