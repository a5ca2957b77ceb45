//! The order of names in the cache.

use std::cmp::Ordering;

/// Compares names as the loader does: runs of digits as numbers, digits above everything else, the
/// rest byte by byte.
pub(super) fn compare(a: &[u8], b: &[u8]) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        match (a.split_first(), b.split_first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some((x, rest_a)), Some((y, rest_b))) => {
                let order = match (x.is_ascii_digit(), y.is_ascii_digit()) {
                    (true, true) => {
                        let (number_a, after_a) = number(a);
                        let (number_b, after_b) = number(b);
                        (a, b) = (after_a, after_b);
                        number_a.cmp(&number_b)
                    }
                    (true, false) => Ordering::Greater,
                    (false, true) => Ordering::Less,
                    (false, false) => {
                        (a, b) = (rest_a, rest_b);
                        x.cmp(y)
                    }
                };
                if order.is_ne() {
                    return order;
                }
            }
        }
    }
}

/// Splits off the number at the front. Wraps like the loader's on numbers that no library
/// has.
fn number(text: &[u8]) -> (i32, &[u8]) {
    let length = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(length);
    let value = digits.iter().fold(0i32, |sum, digit| {
        sum.wrapping_mul(10).wrapping_add(i32::from(digit - b'0'))
    });
    (value, rest)
}
