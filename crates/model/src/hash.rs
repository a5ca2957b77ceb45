//! A hash that never changes: names and lock files are made of it.

/// Returns the FNV-1a hash of bytes, 64 bits. It is the same in every version and on every machine;
/// collisions are easy to make, so nothing may depend on there being none.
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use super::fnv1a;

    #[test]
    fn it_is_fnv_1a() {
        // Test vectors of the authors (draft-eastlake-fnv).
        assert_eq!(fnv1a([]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(*b"foobar"), 0x8594_4171_f739_67e8);
    }
}
