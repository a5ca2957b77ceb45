//! Every generation of drivers with a few boards, MIG mode off and on, through NVML's C ABI: what
//! can be read, what is made, and what is missing, in `fixtures/drivers.txt` (`UPDATE_FIXTURES=1`
//! writes it anew).

use std::path::Path;

use divvy_conformance::{Expect, conformance};
use divvy_gpu_sim::Engine;
use divvy_model::mig::MigCapabilities;
use divvy_model::{GpuDriver, GpuError, GpuUuid, HostTopology, MigMode, peculiarities};
use nvidia_ml::{GENERATIONS, Generation};

use crate::read_inventory;
use crate::test_library::TestLibrary;

#[test]
fn no_driver_makes_a_board_unusable_and_missing_values_are_listed() {
    let mut table = format!(
        "{:<11} MIG {:<12}  SMs PROFILES PARTITION NOT REPORTED\n",
        "DRIVER", "BOARD"
    );
    for driver in GENERATIONS {
        table += &rows(*driver, false);
        table += &rows(*driver, true);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/drivers.txt");
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs_err::write(&path, &table).unwrap();
    }
    assert_eq!(table, fs_err::read_to_string(&path).unwrap());
}

/// A row for each board; with MIG mode on only for those that have it.
fn rows(driver: Generation, mig: bool) -> String {
    let library = TestLibrary::of(driver, &driver.boards());
    let mode = MigMode::Supported {
        current: mig,
        pending: mig,
    };
    let able: Vec<(GpuUuid, String)> = library
        .state
        .edit(|engine| {
            let able = |e: &mut Engine, uuid: &GpuUuid| {
                let gpu = e.gpu(uuid)?;
                let able = gpu.facts.mig_mode != MigMode::Unsupported;
                gpu.facts.mig_mode = if able { mode } else { gpu.facts.mig_mode };
                (able || !mig).then(|| (uuid.clone(), gpu.model.clone()))
            };
            library
                .uuids()
                .iter()
                .filter_map(|uuid| able(engine, uuid))
                .collect()
        })
        .unwrap();
    let (nvml, cell) = (library.open(), format!("{}, MIG {mig}", driver.version));
    assert_eq!(conformance(&nvml, &Expect::default()), [], "{cell}");
    let inventory = read_inventory(&nvml, &|_| HostTopology::default()).unwrap();
    assert_eq!(
        (inventory.gpus.len(), &inventory.problems[..]),
        (library.uuids().len(), &[][..]),
        "{cell}"
    );
    let notes = peculiarities(&nvml);
    let row = |(uuid, board): &(GpuUuid, String)| {
        let gpu = &inventory.gpus[uuid];
        let caps = gpu.mig.as_ref().map(|mig| &mig.capabilities);
        let prepared = caps.filter(|_| mig).map(|caps| make(&nvml, uuid, caps));
        let partition = prepared.map_or("-".to_owned(), |prepared| match prepared {
            Ok(()) => "made".to_owned(),
            Err(error) => error.code.to_string(),
        });
        let number = |n: Option<usize>| n.map_or("-".to_owned(), |n| n.to_string());
        let note = notes
            .iter()
            .find_map(|note| note.strip_prefix(&format!("{uuid}: not reported: ")));
        let row = format!(
            "{:<11} {:<3} {board:<12} {:>4} {:>8} {partition:<9} {}",
            driver.version,
            if mig { "on" } else { "off" },
            number(
                gpu.facts
                    .multiprocessors
                    .and_then(|n| usize::try_from(n).ok())
            ),
            number(caps.map(|caps| caps.profiles().len())),
            note.unwrap_or_default(),
        );
        row.trim_end().to_owned() + "\n"
    };
    able.iter().map(row).collect()
}

/// Makes what preparing a claim of a partition makes, and undoes it as unpreparing does.
fn make(driver: &dyn GpuDriver, gpu: &GpuUuid, caps: &MigCapabilities) -> Result<(), GpuError> {
    let profile = caps.profiles().first().unwrap();
    let made = driver.create_gpu_instance(gpu, profile.id, profile.placements[0])?;
    let all = driver.compute_profiles(gpu, made.id)?;
    let whole = profile.whole_compute_profile(&all).unwrap();
    let compute = driver.create_compute_instance(gpu, made.id, whole.id)?;
    assert_eq!(
        driver.compute_instances(gpu, made.id)?,
        std::slice::from_ref(&compute)
    );
    driver.vitals(gpu)?;
    driver.destroy_compute_instance(gpu, made.id, compute.id)?;
    driver.destroy_gpu_instance(gpu, made.id)?;
    assert_eq!(driver.gpu_instances(gpu)?, []);
    Ok(())
}
