//! Refusals: what the author of a claim reads, and what the executor learns.

use std::error::Error;

use divvy_model::GpuErrorCode;
use serde_json::json;

use super::*;
use crate::{ConfigEntry, ConfigSource};

fn of_whole() -> Claim {
    claim("a", vec![result("main", "gpu-0")])
}

/// A DeviceClass can be corrected, and a claim holds a copy of it; a claim cannot.
#[test]
fn an_invalid_config_is_corrected_where_it_stands() {
    for (source, place) in [
        (
            ConfigSource::Class,
            "correct spec.config of the DeviceClass",
        ),
        (
            ConfigSource::Claim,
            "correct spec.devices.config of the claim or its template",
        ),
    ] {
        let parameters = json!({"apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "typo": 1});
        let entry = ConfigEntry {
            source,
            requests: Vec::new(),
            driver: "gpu.divvy.dev".to_owned(),
            parameters,
        };
        let wrong = Claim {
            configs: vec![entry],
            ..of_whole()
        };
        let (category, text) = World::new().refusal(&wrong);
        assert_eq!(category, "bad-config");
        assert!(text.contains(place), "{text}");
    }
}

/// The message names the layer; the error of the driver comes after it, and is not lost.
#[test]
fn the_cause_of_a_refusal_is_the_error_of_the_driver() {
    let mut world = World::new();
    let error = GpuError::on_gpu(GpuOp::Processes, GpuErrorCode::TIMEOUT, &gpu(0));
    world.processes.insert(gpu(0), Err(error.clone()));
    let Decision::Refuse(refusal) = world.decide(&of_whole()) else {
        panic!("a process may compute on it");
    };
    assert!(!refusal.to_string().contains(&error.to_string()));
    let cause = refusal.source().unwrap().to_string();
    assert_eq!(cause, error.to_string());
}

/// The hardware is asked again where that may answer what the claim was refused for.
#[test]
fn only_a_fence_is_about_a_doubt() {
    let mut world = World::new();
    world
        .other_drivers
        .insert(gpu(0), "driver gpu.b".to_owned());
    world.note(1, small(0), "x", "boot-1", Some("a call hangs"));
    let is_about_doubt = |number: u32| {
        let device = format!("gpu-{number}");
        match world.decide(&claim("b", vec![result("main", &device)])) {
            Decision::Refuse(refusal) => refusal.is_about_doubt(),
            other => panic!("{other:?}"),
        }
    };
    assert!(is_about_doubt(1));
    assert!(!is_about_doubt(0));
}

/// A claim that was allocated anew waits for what it was given before.
#[test]
fn what_an_earlier_allocation_has_left_is_said_with_its_device() {
    let world = World::new();
    let (earlier, now) = (of_whole(), claim("a", vec![result("main", "gpu-1")]));
    let record = world.record(&earlier, Phase::Prepared);
    let in_use = Refusal::earlier_in_use(&now, &record, "process 7".to_owned()).unwrap();
    assert_eq!((in_use.category(), in_use.retry()), ("held", Retry::Later));
    let text = in_use.to_string();
    let words = "it is still held by claim ns/claim-a (UID a), to which it is no longer allocated: process 7";
    assert!(text.contains(words), "{text}");

    let stuck = Refusal::earlier_stuck(&now, &record, "a call hangs".to_owned()).unwrap();
    assert_eq!((stuck.category(), stuck.retry()), ("fenced", Retry::Soon));
    let text = stuck.to_string();
    assert!(text.contains("is unknown: a call hangs"), "{text}");
    for refusal in [in_use, stuck] {
        let of = format!("device gpu-0 ({}) of claim ns/claim-a", gpu(0));
        assert!(refusal.to_string().starts_with(&of), "{refusal}");
    }
}
