//! Knowledge of all nodes for one shape, which lasts until the node has other content.

/// Nodes in a word.
const WIDTH: usize = 64;

/// Nodes that may hold a pod of a shape, those of them that do, and the number of the former.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    /// A bit for each node: cleared where it is known that the pod does not fit.
    open: Vec<u64>,
    /// A bit for each node: set where it is known that the pod fits.
    fits: Vec<u64>,
    count: usize,
}

/// Returns the place of a node: its word, and its bit there.
fn place(node: usize) -> (usize, u64) {
    (node / WIDTH, 1 << (node % WIDTH))
}

impl Reach {
    /// Knows nothing of so many nodes.
    pub(crate) fn of(nodes: usize) -> Self {
        let words = nodes.div_ceil(WIDTH);
        let open = (0..words).map(|word| match nodes - word * WIDTH {
            rest if rest < WIDTH => (1 << rest) - 1,
            _ => u64::MAX,
        });
        Self {
            open: open.collect(),
            fits: vec![0; words],
            count: nodes,
        }
    }

    /// Says whether every node is known to be full.
    pub(crate) fn is_closed(&self) -> bool {
        self.count == 0
    }

    /// Returns the first of some nodes that is not known to be full.
    pub(crate) fn next_open(&self, from: usize, until: usize) -> Option<usize> {
        let (first, _) = place(from);
        let words = self.open.iter().enumerate().skip(first);
        for (number, word) in words {
            let start = number * WIDTH;
            if start >= until {
                return None;
            }
            let passed = from.saturating_sub(start).min(WIDTH - 1);
            let rest = word & (u64::MAX << passed);
            if rest != 0 {
                let node = start + usize::try_from(rest.trailing_zeros()).unwrap_or(WIDTH);
                return Some(node).filter(|node| *node < until);
            }
        }
        None
    }

    pub(crate) fn is_known_to_fit(&self, node: usize) -> bool {
        let (word, bit) = place(node);
        self.fits.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Notes the answer for a node that is not known to be full.
    pub(crate) fn learn(&mut self, node: usize, fits: bool) {
        let (word, bit) = place(node);
        let of = if fits { &mut self.fits } else { &mut self.open };
        let Some(word) = of.get_mut(word) else {
            return;
        };
        if fits {
            *word |= bit;
        } else if *word & bit != 0 {
            *word &= !bit;
            self.count -= 1;
        }
    }

    /// Notes that a pod left a node: what fitted still does, what did not may fit now.
    pub(crate) fn has_more(&mut self, node: usize) {
        let (word, bit) = place(node);
        if let Some(word) = self.open.get_mut(word).filter(|word| **word & bit == 0) {
            *word |= bit;
            self.count += 1;
        }
    }

    /// Notes that a pod came to a node: what did not fit still does not, what fitted may not now.
    pub(crate) fn has_less(&mut self, node: usize) {
        let (word, bit) = place(node);
        if let Some(word) = self.fits.get_mut(word) {
            *word &= !bit;
        }
    }
}
