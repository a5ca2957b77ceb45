//! The answers that a selector has given, by what it read.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

use super::reads::{Read, Seen};

/// Answers that are kept of one selector. A selector that reads UUIDs has as many as there are devices, others few.
const MAX_KEPT: usize = 4096;

/// The answers of one selector.
#[derive(Debug)]
pub(super) struct Known {
    reads: Vec<Read>,
    answers: Mutex<Answers>,
}

#[derive(Debug, Default)]
struct Answers {
    kept: usize,
    by_hash: HashMap<u64, Vec<Answer>>,
}

#[derive(Debug)]
struct Answer {
    driver: String,
    seen: Vec<Kept>,
    selected: bool,
}

/// [`Seen`], owned.
#[derive(Debug)]
enum Kept {
    Shared(bool),
    Attribute(Option<DeviceAttribute>),
    Capacity(Option<String>),
}

impl Kept {
    fn is(&self, seen: &Seen<'_>) -> bool {
        match (self, seen) {
            (Self::Shared(kept), Seen::Shared(seen)) => kept == seen,
            (Self::Attribute(kept), Seen::Attribute(seen)) => kept.as_ref() == *seen,
            (Self::Capacity(kept), Seen::Capacity(seen)) => kept.as_deref() == *seen,
            _ => false,
        }
    }
}

impl Known {
    pub(super) fn new(reads: Vec<Read>) -> Self {
        Self { reads, answers: Mutex::default() }
    }

    /// The answer for a device: one that was given before, or that of `evaluate`. A failure is not kept: it names
    /// what failed, and ends the search anyway.
    pub(super) fn or_else<E>(
        &self,
        driver: &str,
        device: &Device,
        evaluate: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let seen: Vec<Seen<'_>> = self.reads.iter().map(|read| read.of(driver, device)).collect();
        let hash = hash(driver, &seen);
        let is_it = |answer: &&Answer| {
            answer.driver == driver && answer.seen.iter().zip(&seen).all(|(kept, seen)| kept.is(seen))
        };
        // A panic elsewhere cannot leave the answers half changed.
        let lock = || self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = lock().by_hash.get(&hash).and_then(|answers| answers.iter().find(is_it)) {
            return Ok(answer.selected);
        }
        let selected = evaluate()?;
        let mut answers = lock();
        if answers.kept >= MAX_KEPT {
            *answers = Answers::default();
        }
        answers.kept += 1;
        let answer =
            Answer { driver: driver.to_owned(), seen: seen.into_iter().map(keep).collect(), selected };
        answers.by_hash.entry(hash).or_default().push(answer);
        Ok(selected)
    }
}

fn keep(seen: Seen<'_>) -> Kept {
    match seen {
        Seen::Shared(shared) => Kept::Shared(shared),
        Seen::Attribute(attribute) => Kept::Attribute(attribute.cloned()),
        Seen::Capacity(capacity) => Kept::Capacity(capacity.map(str::to_owned)),
    }
}

/// A hash of what lists and rarer types hold is not worth the while: those that agree in the rest are compared.
fn hash(driver: &str, seen: &[Seen<'_>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    driver.hash(&mut hasher);
    for seen in seen {
        match seen {
            Seen::Shared(shared) => shared.hash(&mut hasher),
            Seen::Attribute(None) => 0_u8.hash(&mut hasher),
            Seen::Attribute(Some(attribute)) => {
                (attribute.int, attribute.bool).hash(&mut hasher);
                attribute.string.as_deref().or(attribute.version.as_deref()).hash(&mut hasher);
            }
            Seen::Capacity(capacity) => capacity.hash(&mut hasher),
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::cel::{compile, eval};

    fn device(name: &str, kind: &str) -> Device {
        let text = |value: &str| DeviceAttribute { string: Some(value.to_owned()), ..Default::default() };
        let attributes = [("type".to_owned(), text(kind)), ("uuid".to_owned(), text(name))];
        Device { name: name.to_owned(), attributes: Some(attributes.into()), ..Device::default() }
    }

    #[test]
    fn devices_that_agree_in_what_is_read_are_evaluated_once_and_a_failure_every_time() {
        let program = compile(r#"device.attributes["d"].type == "gpu""#).unwrap();
        let known = program.known.as_ref().unwrap();
        let asked = Cell::new(0);
        let answer = |driver: &str, device: &Device, answer: Result<bool, ()>| {
            known.or_else(driver, device, || {
                asked.set(asked.get() + 1);
                answer
            })
        };
        let mut seen = Vec::new();
        for (driver, device, given) in [
            ("d", device("a", "gpu"), Ok(true)),
            ("d", device("b", "gpu"), Ok(true)),
            ("d", device("c", "mig"), Err(())),
            ("d", device("c", "mig"), Ok(false)),
            ("d", device("e", "mig"), Ok(false)),
            ("other", device("f", "gpu"), Ok(false)),
        ] {
            assert_eq!(answer(driver, &device, given), given);
            seen.push(asked.get());
        }
        assert_eq!(seen, [1, 1, 2, 3, 3, 4]);
    }

    #[test]
    fn more_answers_than_are_kept_are_still_right() {
        let program = compile(r#"device.attributes["d"].uuid == "7""#).unwrap();
        let all: Vec<Device> = (0..MAX_KEPT + 10).map(|n| device(&n.to_string(), "gpu")).collect();
        for _ in 0..2 {
            let selected = all.iter().filter(|device| eval(&program, "d", device).unwrap());
            assert_eq!(selected.map(|device| device.name.as_str()).collect::<Vec<_>>(), ["7"]);
        }
        assert!(program.known.as_ref().unwrap().answers.lock().unwrap().kept <= MAX_KEPT);
    }
}
