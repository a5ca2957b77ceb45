//! The file of a GPU (`gpus/<uuid>.json`): its state, and nothing about who asked.

use divvy_gpu::GpuState;

use crate::stored::{self, Head, Stored};

const VERSION: u32 = 1;

/// Returns the bytes of a GPU's file.
pub fn encode_gpu_state(state: &GpuState) -> Vec<u8> {
    stored::encode(VERSION, &Head::default(), state)
}

/// Reads the bytes of a GPU's file.
pub fn decode_gpu_state(bytes: &[u8]) -> Stored<GpuState> {
    stored::decode(VERSION, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured() -> Vec<u8> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        fs_err::read(folder.join("fixtures/gpu-state-v1.json")).unwrap()
    }

    /// Until the first release a change of the format changes this file; after it, a version is
    /// added.
    #[test]
    fn a_state_is_written_and_read_as_captured() {
        let Stored::Fine(state) = decode_gpu_state(&captured()) else {
            panic!("not read");
        };
        assert_eq!(encode_gpu_state(&state), captured());
        // Every kind of note is in it.
        let settings = (state.mig, state.compute, state.slice);
        assert!(matches!(settings, (Some(_), Some(_), Some(_))), "{state:?}");
        assert_eq!((state.mps.len(), state.instances.len()), (2, 4));
    }

    /// Every cut and every bit that turns is noticed: a damaged file is never taken for "nothing".
    #[test]
    fn a_damaged_state_is_corrupt() {
        let whole = captured();
        let end = whole.len() - 1; // the newline at the end may go
        for length in 0..end {
            let read = decode_gpu_state(&whole[..length]);
            assert!(matches!(read, Stored::Corrupt { .. }), "{length} bytes");
        }
        for at in 0..end {
            let mut changed = whole.clone();
            changed[at] ^= 0x01;
            let read = decode_gpu_state(&changed);
            assert!(matches!(read, Stored::Corrupt { .. }), "byte {at}");
        }
    }

    #[test]
    fn memory_that_shares_do_not_get_and_promises_of_caps_are_kept() {
        use divvy_model::CapsPromise::{Ended, Given, Never};
        for caps in [Never, Given, Ended { at: 7 }] {
            let mut state = GpuState::default();
            state.grant.share_reserved_mib = 512;
            state.grant.caps = caps;
            let read = decode_gpu_state(&encode_gpu_state(&state));
            assert_eq!(read.fine(), Some(&state));
        }
    }
}
