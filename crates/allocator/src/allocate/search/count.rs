//! Counting instead of searching: a device that is not shared serves one request, so that many
//! requests for few devices cannot be met in any order.

use super::super::request::Mode;
use super::Search;

/// Largest table of wanted and available devices that is counted.
const MOST: usize = 1 << 16;

/// A table of the devices that are wanted and the candidates for each.
struct Table {
    /// Candidates by wanted device.
    candidates: Vec<Vec<usize>>,
    /// Wanted device by candidate that serves it.
    serves: Vec<Option<usize>>,
}

impl Table {
    /// Finds a candidate for a wanted device, moving others where that frees one.
    fn serve(&mut self, wanted: usize, seen: &mut [bool]) -> bool {
        for candidate in self.candidates.get(wanted).cloned().unwrap_or_default() {
            match seen.get_mut(candidate) {
                Some(seen) if !*seen => *seen = true,
                _ => continue,
            }
            let other = self.serves.get(candidate).copied().flatten();
            if other.is_none_or(|other| self.serve(other, seen)) {
                if let Some(slot) = self.serves.get_mut(candidate) {
                    *slot = Some(wanted);
                }
                return true;
            }
        }
        false
    }
}

impl Search<'_, '_> {
    /// Counts the devices that the requests want together and how many of them the available
    /// devices serve at most; `None` if all, or if that cannot be said. The search must have no
    /// picks.
    ///
    /// Requests with alternatives or admin access, and those that a shared device may serve, are
    /// left out: they can only make it worse.
    pub(crate) fn too_few(&mut self) -> Option<(usize, usize)> {
        let prepared = self.prepared;
        let mut candidates: Vec<Vec<usize>> = Vec::new();
        for choice in prepared.claims.iter().flat_map(|claim| &claim.requests) {
            let [request] = choice.alternatives.as_slice() else {
                continue;
            };
            if request.admin {
                continue;
            }
            let mut fit = Vec::new();
            let mut is_shared = false;
            for (index, candidate) in prepared.candidates.iter().enumerate() {
                // An error is for the search to meet.
                if self.refusal(request, index).ok()?.is_none() {
                    fit.push(index);
                    is_shared |= candidate.shared;
                }
            }
            if is_shared {
                continue;
            }
            let wanted = match request.mode {
                Mode::Exact(count) => count,
                Mode::All => self.wanted(request),
            };
            if (candidates.len() + wanted).saturating_mul(prepared.candidates.len()) > MOST {
                return None;
            }
            candidates.extend(std::iter::repeat_n(fit, wanted));
        }
        let wanted = candidates.len();
        let mut table = Table {
            candidates,
            serves: vec![None; prepared.candidates.len()],
        };
        let served = (0..wanted)
            .filter(|one| table.serve(*one, &mut vec![false; prepared.candidates.len()]))
            .count();
        (served < wanted).then_some((wanted, served))
    }
}
