//! The file of GPU numbers (`node/ordinals.json`).

use divvy_model::Ordinals;
use serde::{Deserialize, Serialize};

use crate::Stored;
use crate::stored::{self, Head};

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Numbers<O> {
    numbers: O,
}

/// Returns the bytes of the file.
pub fn encode_ordinals(ordinals: &Ordinals) -> Vec<u8> {
    stored::encode(VERSION, &Head::default(), &Numbers { numbers: ordinals })
}

/// Reads the numbers, unless the file is not what was written.
pub fn decode_ordinals(bytes: &[u8]) -> Stored<Ordinals> {
    match stored::decode::<NumbersOf>(VERSION, bytes) {
        // A device name would mean two GPUs, and a claim could get the wrong one.
        Stored::Fine(Numbers { numbers }) if numbers.is_ambiguous() => Stored::Corrupt {
            reason: "two GPUs have one number".to_owned(),
        },
        Stored::Fine(Numbers { numbers }) => Stored::Fine(numbers),
        Stored::Absent => Stored::Absent,
        Stored::Corrupt { reason } => Stored::Corrupt { reason },
        Stored::Newer { version, head } => Stored::Newer { version, head },
    }
}

type NumbersOf = Numbers<Ordinals>;

#[cfg(test)]
mod tests {
    use divvy_model::GpuUuid;

    use super::*;

    fn numbers() -> Ordinals {
        let gpu = |n: u32| -> GpuUuid {
            format!("GPU-12345678-1234-1234-1234-{n:012}")
                .parse()
                .unwrap()
        };
        [(gpu(1), 0), (gpu(2), 11)].into_iter().collect()
    }

    #[test]
    fn numbers_read_back_as_written() {
        for numbers in [numbers(), Ordinals::default()] {
            assert_eq!(
                decode_ordinals(&encode_ordinals(&numbers)),
                Stored::Fine(numbers)
            );
        }
    }

    #[test]
    fn two_gpus_with_one_number_are_not_what_was_written() {
        let one = numbers().iter().map(|(gpu, _)| (gpu.clone(), 0)).collect();
        let read = decode_ordinals(&encode_ordinals(&one));
        assert!(matches!(read, Stored::Corrupt { .. }), "{read:?}");
    }

    #[test]
    fn any_bit_that_turns_is_noticed() {
        let written = encode_ordinals(&numbers());
        // A newline more or less is none of the content.
        let content = written.len() - 1;
        for at in (0..content).filter(|at| written[*at] != b'\n') {
            for bit in 0..8 {
                let mut turned = written.clone();
                turned[at] ^= 1 << bit;
                assert!(
                    matches!(decode_ordinals(&turned), Stored::Corrupt { .. }),
                    "bit {bit} of byte {at}"
                );
            }
        }
        for length in 0..content {
            assert!(
                matches!(decode_ordinals(&written[..length]), Stored::Corrupt { .. }),
                "{length} bytes"
            );
        }
    }
}
