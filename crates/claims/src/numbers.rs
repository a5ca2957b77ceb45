//! The file of GPU numbers: `{"GPU-…": 0, …}`, as every version has written it, and behind it a checksum in white space
//! (a space is 0, a tab 1), which versions without it read as if it were not there.

use divvy_model::Ordinals;

use crate::Stored;
use crate::stored::checksum;

const BITS: usize = 64;

/// The bytes of the file.
pub fn encode_ordinals(ordinals: &Ordinals) -> Vec<u8> {
    // Names and numbers: serialising has no way to fail; a reader would answer `Corrupt`.
    let body = serde_json::to_string(ordinals).unwrap_or_default();
    format!("{body}\n{}\n", white(&body)).into_bytes()
}

/// The numbers, unless the file is not what was written. One without a checksum is of a version before it.
pub fn decode_ordinals(bytes: &[u8]) -> Stored<Ordinals> {
    let corrupt = |reason: String| Stored::Corrupt { reason };
    let ordinals: Ordinals = match serde_json::from_slice(bytes) {
        Ok(ordinals) => ordinals,
        Err(error) => return corrupt(format!("the file is not valid JSON: {error}")),
    };
    if ordinals.is_ambiguous() {
        return corrupt("two GPUs have one number".to_owned());
    }
    let text = String::from_utf8_lossy(bytes);
    let body = text.trim_end();
    let found = text.get(body.len()..).unwrap_or_default().trim_matches('\n');
    if found.is_empty() || found == white(body) {
        Stored::Fine(ordinals)
    } else {
        corrupt("the checksum does not match the content".to_owned())
    }
}

fn white(body: &str) -> String {
    let digits = checksum(body);
    let bits = digits.chars().filter_map(|digit| digit.to_digit(16));
    let bits = bits.flat_map(|digit| (0..4).map(move |bit| if digit >> bit & 1 == 0 { ' ' } else { '\t' }));
    bits.take(BITS).collect()
}

#[cfg(test)]
mod tests {
    use divvy_model::GpuUuid;

    use super::*;

    fn numbers() -> Ordinals {
        let gpu = |n: u32| -> GpuUuid { format!("GPU-12345678-1234-1234-1234-{n:012}").parse().unwrap() };
        [(gpu(1), 0), (gpu(2), 11)].into_iter().collect()
    }

    #[test]
    fn an_older_version_reads_what_this_one_writes_and_the_other_way_round() {
        let (numbers, written) = (numbers(), encode_ordinals(&numbers()));
        assert_eq!(decode_ordinals(&written), Stored::Fine(numbers.clone()));
        assert_eq!(serde_json::from_slice::<Ordinals>(&written).unwrap(), numbers);
        for before in ["", "\n"] {
            let before = serde_json::to_string(&numbers).unwrap() + before;
            assert_eq!(decode_ordinals(before.as_bytes()), Stored::Fine(numbers.clone()));
        }
        assert_eq!(
            decode_ordinals(&encode_ordinals(&Ordinals::default())),
            Stored::Fine(Ordinals::default())
        );
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
                assert!(matches!(decode_ordinals(&turned), Stored::Corrupt { .. }), "bit {bit} of byte {at}");
            }
        }
        for length in 0..serde_json::to_vec(&numbers()).unwrap().len() {
            assert!(matches!(decode_ordinals(&written[..length]), Stored::Corrupt { .. }), "{length} bytes");
        }
    }
}
