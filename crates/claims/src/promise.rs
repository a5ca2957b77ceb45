//! The second copy of the promise that shares of a GPU are capped (`node/caps-<uuid>.json`): shares
//! that were chosen for it may wait to be prepared when the GPU's file is lost.

use divvy_model::CapsPromise;
use serde::{Deserialize, Serialize};

use crate::Stored;
use crate::stored::{self, Head};

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct File {
    caps: CapsPromise,
}

/// Returns the bytes of the file.
pub fn encode_promise(caps: CapsPromise) -> Vec<u8> {
    stored::encode(VERSION, &Head::default(), &File { caps })
}

/// Returns the promise. A file that cannot be read may hold one that has not ended.
pub fn decode_promise(bytes: &[u8]) -> CapsPromise {
    match stored::decode::<File>(VERSION, bytes) {
        Stored::Fine(file) => file.caps,
        Stored::Absent | Stored::Corrupt { .. } | Stored::Newer { .. } => CapsPromise::Given,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_that_cannot_be_read_may_hold() {
        for caps in [CapsPromise::Given, CapsPromise::Ended { at: 7 }] {
            let bytes = encode_promise(caps);
            assert_eq!(decode_promise(&bytes), caps);
            // Without its last brace; after that is the end of the line.
            let torn = &bytes[..bytes.len() - 2];
            for unknown in [torn, b"", b"{}", b"null"] {
                assert_eq!(decode_promise(unknown), CapsPromise::Given);
            }
        }
    }
}
