//! Numbers that look random and follow from a seed (SplitMix64).

/// A source of numbers.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws one of `count` numbers from 0.
    pub fn below(&mut self, count: usize) -> usize {
        let drawn = u128::from(self.next()) * (count as u128);
        usize::try_from(drawn >> 64).unwrap_or(0)
    }

    /// Draws a number above 0 and at most 1.
    pub(crate) fn part(&mut self) -> f64 {
        // 53 bits are what a double holds.
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let drawn = ((self.next() >> 11) + 1) as f64;
        drawn / 9_007_199_254_740_992.0
    }

    /// Draws from the normal distribution.
    pub(crate) fn normal(&mut self) -> f64 {
        let (radius, angle) = (self.part(), self.part());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }
}
