use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{ComputeMode, GpuError, GpuErrorCode, GpuOp, Hold, MigMode, MpsServer, Sharing};

use super::*;
use crate::holds::{Holds, Since, Standing, Use, Whose};
use crate::instances::{Instance, Life, Made};
use crate::servers::MpsSeen;

/// A use of a target with a server.
fn one(target: Target, sharing: Sharing, mps: Option<MpsServer>) -> Use {
    Use {
        hold: Hold {
            claim: "a".parse().unwrap(),
            gpu: "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap(),
            device: "gpu-0".parse().unwrap(),
            target,
            sharing,
            theirs: false,
            time_slice: None,
            mps,
        },
        namespace: None,
        given: None,
        since: Since::ThisBoot,
        standing: Standing::Prepared,
    }
}

fn changes(state: &GpuState, seen: &GpuSeen, others: &[Use], whose: Whose) -> Vec<Change> {
    let holds = Holds {
        others: others.to_vec(),
        unknown: false,
        whose,
    };
    let scope = Scope::new(holds, state.grant, &state.instances);
    diff(state, seen, &Goal::of(&scope, &state.mps), &scope)
}

fn running(server: MpsServer) -> MpsSeen {
    MpsSeen {
        server,
        partition: None,
        namespaces: None,
        unwell: None,
    }
}

fn with_mig() -> GpuSeen {
    GpuSeen {
        mig: Some(Ok(MigMode::Supported {
            current: true,
            pending: true,
        })),
        ..GpuSeen::default()
    }
}

/// A mode that an administrator has set under a server stays; a server that is started gets its
/// own.
#[test]
fn a_server_of_a_gpu_is_started_where_no_program_gets_round_it() {
    let server = MpsServer::NAMESPACES;
    let target = Target::Gpu;
    let exclusive = Change::SetComputeMode(ComputeMode::ExclusiveProcess);
    let start = Change::StartMps(target, server);
    let (default, set) = (ComputeMode::Default, ComputeMode::ExclusiveProcess);
    for (runs, compute, expected) in [
        (true, default, vec![]),
        (false, default, vec![exclusive, start.clone()]),
        (false, set, vec![start]),
    ] {
        let servers = runs.then(|| (target, running(server)));
        let seen = GpuSeen {
            mps: Some(Ok(servers.into_iter().collect())),
            compute: Some(Ok(compute)),
            ..GpuSeen::default()
        };
        let mut state = GpuState::default();
        state.note_server(target, server, true);
        let share = one(target, Sharing::Mps, Some(server));
        assert_eq!(changes(&state, &seen, &[share], Whose::Round), expected);
    }
}

/// The claim that has a partition alone is taken up again while the partition cannot be read.
#[test]
fn the_server_of_a_partition_that_cannot_be_read_is_not_ended() {
    let place: Place = "9@4+4".parse().unwrap();
    let (target, server) = (Target::Partition(place), MpsServer::of_claim(None, None));
    let made = Made {
        gi: GpuInstanceId(3),
        ci: ComputeInstanceId(0),
        uuid: "MIG-ours".parse().unwrap(),
    };
    let noted = Instance {
        made_for: "a".parse().unwrap(),
        life: Life::Whole(made.clone()),
        doubt: None,
    };
    let mut state = GpuState {
        instances: [(place, noted)].into(),
        ..GpuState::default()
    };
    state.note_server(target, server, true);
    let here = MpsSeen {
        partition: Some(made.uuid),
        ..running(server)
    };
    let error = GpuError::global(GpuOp::GpuInstances, GpuErrorCode::UNKNOWN);
    let seen = GpuSeen {
        mps: Some(Ok([(target, here)].into())),
        places: [(place, Err(error))].into(),
        ..with_mig()
    };
    let own = one(target, Sharing::Exclusive, Some(server));
    let gets = Whose::Gets("a".parse().unwrap(), vec![own]);
    assert_eq!(changes(&state, &seen, &[], gets), [Change::Create(place)]);
}

/// A partition that others hold is made again for a claim that joins them, and never removed.
#[test]
fn the_remains_of_a_partition_that_others_hold_stay() {
    let place: Place = "9@4+4".parse().unwrap();
    let target = Target::Partition(place);
    let noted = Instance {
        made_for: "a".parse().unwrap(),
        life: Life::Half {
            gi: GpuInstanceId(3),
        },
        doubt: None,
    };
    let state = GpuState {
        instances: [(place, noted)].into(),
        ..GpuState::default()
    };
    let share = || one(target, Sharing::TimeSliced, None);
    let gets = || Whose::Gets("a".parse().unwrap(), vec![share()]);
    let seen = with_mig();
    let (remove, create) = (Change::Remove(place), Change::Create(place));
    assert_eq!(
        changes(&state, &seen, &[], gets()),
        [remove, create.clone()]
    );
    assert_eq!(changes(&state, &seen, &[share()], gets()), [create]);
    assert_eq!(changes(&state, &seen, &[share()], Whose::Round), []);
}
