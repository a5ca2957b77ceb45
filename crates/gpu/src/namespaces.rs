//! Namespaces of the MPS server of a whole GPU: a claim's part of a server of protocol v3. They
//! have no note: the supervisor lists them.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{GpuUuid, MpsNamespace, MpsNamespaceName};

use crate::change::Change;
use crate::holds::Use;

/// Reading of the namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen<'s> {
    /// No server runs yet, and one that is started has none.
    NoServer,
    /// The supervisor does not answer.
    Unread,
    /// By notes alone it is not known which there are: they count as wanted.
    NotAsked,
    Listed(&'s BTreeMap<MpsNamespaceName, MpsNamespace>),
}

/// Returns the namespaces that users need.
pub(crate) fn want<'u>(
    uses: impl Iterator<Item = &'u Use>,
) -> BTreeMap<MpsNamespaceName, MpsNamespace> {
    let served = uses.filter(|one| one.is_served());
    let wanted = served.filter_map(|one| one.namespace);
    wanted.map(|one| (one.name, one)).collect()
}

/// Returns what ends namespaces and what makes others. `may_be_there`: those that count as there as
/// long as nothing says that they are not.
pub(crate) fn changes(
    seen: Seen<'_>,
    want: &BTreeMap<MpsNamespaceName, MpsNamespace>,
    may_be_there: &BTreeSet<MpsNamespaceName>,
) -> Vec<Change> {
    let none = BTreeMap::new();
    let (listed, unlisted) = match seen {
        Seen::NotAsked => return Vec::new(),
        Seen::NoServer => (&none, None),
        Seen::Unread => (&none, Some(may_be_there)),
        Seen::Listed(listed) => (listed, None),
    };
    let there = listed.keys().chain(unlisted.into_iter().flatten());
    let end = there.filter(|name| !want.contains_key(name));
    let put = want
        .values()
        .filter(|one| listed.get(&one.name) != Some(*one));
    let end = end.map(|name| Change::RemoveNamespace(*name));
    end.chain(put.map(|one| Change::PutNamespace(*one)))
        .collect()
}

/// Returns the end of a namespace in words.
pub(crate) fn removed(name: MpsNamespaceName, gpu: &GpuUuid) -> String {
    format!("end the namespace {name} of the MPS server of {gpu}")
}

/// Returns the making of a namespace in words.
pub(crate) fn put(namespace: &MpsNamespace, gpu: &GpuUuid) -> String {
    let MpsNamespace { name, cores, .. } = namespace;
    format!(
        "make the namespace {name} of the MPS server of {gpu}, with {cores} percent of the threads"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(claim: &str) -> MpsNamespace {
        let device = "gpu-0-mps".parse().unwrap();
        MpsNamespace {
            name: MpsNamespaceName::of(&claim.parse().unwrap(), &device),
            cores: 30,
            memory_mib: None,
        }
    }

    fn map(all: &[MpsNamespace]) -> BTreeMap<MpsNamespaceName, MpsNamespace> {
        all.iter().map(|one| (one.name, *one)).collect()
    }

    #[test]
    fn namespaces_that_are_needed_are_made_and_all_others_end() {
        let (a, b) = (of("a"), of("b"));
        let begun = MpsNamespace { cores: 0, ..a };
        let put = Change::PutNamespace(a);
        let end = Change::RemoveNamespace(b.name);
        let (want, own) = (map(&[a]), [b.name].into());
        for (there, expected) in [
            (vec![], vec![put.clone()]),
            (vec![a], vec![]),
            (vec![begun], vec![put.clone()]),
            (vec![a, b], vec![end.clone()]),
        ] {
            let there = map(&there);
            assert_eq!(changes(Seen::Listed(&there), &want, &own), expected);
        }
        // A server that is started has none, and none is there.
        assert_eq!(
            changes(Seen::NoServer, &want, &own),
            std::slice::from_ref(&put)
        );
        // Nothing says that it is not there.
        assert_eq!(changes(Seen::Unread, &want, &own), [end, put]);
        assert_eq!(changes(Seen::NotAsked, &want, &own), []);
    }
}
