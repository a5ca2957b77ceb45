//! Functions over lists, sets and maps, and what the comprehension macros expand to.

use std::cmp::Ordering;
use std::collections::HashMap;

use cel::common::functions::Function;
use cel::common::types::{
    CelBool, CelInt, CelList, CelMap, CelMapKey, CelOptional, DYN_TYPE, LIST_TYPE, MAP_TYPE,
};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError};

use super::library::{Outcome, failed};

/// Declares everything of this module.
pub(super) fn declare(env: &mut Env) -> Result<(), DeclarationError> {
    for (name, function) in [
        ("isSorted", is_sorted as Function),
        ("sum", sum),
        ("min", smallest),
        ("max", largest),
        ("first", first),
        ("last", last),
    ] {
        env.add_member_overload(name, &format!("list_{name}"), LIST_TYPE, vec![], function)?;
    }
    env.add_member_overload(
        "indexOf",
        "list_indexOf",
        LIST_TYPE,
        vec![DYN_TYPE],
        index_of,
    )?;
    env.add_member_overload(
        "lastIndexOf",
        "list_lastIndexOf",
        LIST_TYPE,
        vec![DYN_TYPE],
        last_index_of,
    )?;
    env.add_member_overload(
        "includes",
        "dyn_includes",
        DYN_TYPE,
        vec![DYN_TYPE],
        includes,
    )?;
    for (name, function) in [
        ("sets.contains", set_contains as Function),
        ("sets.equivalent", set_equivalent),
        ("sets.intersects", set_intersects),
    ] {
        env.add_overload(name, name, vec![LIST_TYPE, LIST_TYPE], function)?;
    }
    // The comprehension macros expand to these; `@` cannot be written in an expression.
    env.add_overload("@reverse", "@reverse", vec![LIST_TYPE], reverse)?;
    env.add_overload("@pairs", "list_pairs", vec![LIST_TYPE], pairs)?;
    env.add_overload("@pairs", "map_pairs", vec![MAP_TYPE], pairs)?;
    env.add_overload("@key", "pair_key", vec![LIST_TYPE], pair_key)?;
    env.add_overload("@value", "pair_value", vec![LIST_TYPE], pair_value)?;
    env.add_overload("@pair", "pair", vec![DYN_TYPE, DYN_TYPE], pair)?;
    env.add_overload("@toMap", "list_to_map", vec![LIST_TYPE], to_map)?;
    env.add_overload("@merge", "list_merge", vec![LIST_TYPE], merge)
}

pub(super) fn take<'b, 'v, const N: usize>(
    args: Vec<CowVal<'b, 'v>>,
) -> Result<[CowVal<'b, 'v>; N], ExecutionError> {
    args.try_into()
        .map_err(|args: Vec<_>| ExecutionError::invalid_argument_count(N, args.len()))
}

pub(super) fn list_of<'b, 'v>(items: Vec<Box<dyn Val + 'v>>) -> CowVal<'b, 'v> {
    CowVal::owned(CelList::from(items))
}

/// The elements of a list, or the keys of a map.
fn items<'v>(list: &(dyn Val + 'v)) -> Result<Vec<Box<dyn Val + 'v>>, ExecutionError> {
    let iterable = list
        .as_iterable()
        .ok_or_else(|| failed("list", "no such overload"))?;
    let mut iter = iterable.iter();
    let mut all = Vec::new();
    while let Some(item) = iter.next() {
        all.push(item.clone_as_boxed());
    }
    Ok(all)
}

/// Reverses lists only: cel-go's later version for strings is not in Kubernetes.
fn reverse<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    Ok(list_of(items(list.as_ref())?.into_iter().rev().collect()))
}

fn compare(a: &dyn Val, b: &dyn Val) -> Result<Ordering, ExecutionError> {
    let comparer = a
        .as_comparer()
        .ok_or_else(|| failed("list", "no such overload"))?;
    comparer.compare(b)
}

fn is_sorted<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut sorted = true;
    let all = items(list.as_ref())?;
    for (a, b) in all.iter().zip(all.iter().skip(1)) {
        sorted &= compare(a.as_ref(), b.as_ref())? != Ordering::Greater;
    }
    Ok(CowVal::owned(CelBool::from(sorted)))
}

fn sum<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut all = items(list.as_ref())?.into_iter();
    let Some(mut total) = all.next() else {
        return Ok(CowVal::owned(CelInt::from(0)));
    };
    for item in all {
        let adder = total
            .as_adder()
            .ok_or_else(|| failed("sum", "no such overload"))?;
        total = adder.add(item.as_ref())?.into_owned();
    }
    Ok(CowVal::Owned(total))
}

fn extreme<'b, 'v>(args: Vec<CowVal<'b, 'v>>, name: &str, wanted: Ordering) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut all = items(list.as_ref())?.into_iter();
    let mut best = all
        .next()
        .ok_or_else(|| failed(name, format!("{name} called on empty list")))?;
    for item in all {
        if compare(item.as_ref(), best.as_ref())? == wanted {
            best = item;
        }
    }
    Ok(CowVal::Owned(best))
}

fn smallest<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    extreme(args, "min", Ordering::Less)
}

fn largest<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    extreme(args, "max", Ordering::Greater)
}

fn optional<'b, 'v>(item: Option<Box<dyn Val + 'v>>) -> CowVal<'b, 'v> {
    CowVal::owned(item.map_or_else(CelOptional::none, CelOptional::of))
}

fn first<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    Ok(optional(items(list.as_ref())?.into_iter().next()))
}

fn last<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    Ok(optional(items(list.as_ref())?.pop()))
}

fn position(index: Option<usize>) -> CelInt {
    CelInt::from(index.and_then(|i| i64::try_from(i).ok()).unwrap_or(-1))
}

fn index_of<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list, wanted] = take(args)?;
    let all = items(list.as_ref())?;
    Ok(CowVal::owned(position(
        all.iter().position(|item| item.equals(wanted.as_ref())),
    )))
}

fn last_index_of<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list, wanted] = take(args)?;
    let all = items(list.as_ref())?;
    Ok(CowVal::owned(position(
        all.iter().rposition(|item| item.equals(wanted.as_ref())),
    )))
}

/// A list includes its elements, any other value includes itself.
fn includes<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    const LONGEST: usize = 48;
    let [this, wanted] = take(args)?;
    let found = if this.get_type() == &LIST_TYPE {
        let all = items(this.as_ref())?;
        if all.len() > LONGEST {
            let text = format!("list has {} elements, more than {LONGEST}", all.len());
            return Err(failed("includes", text));
        }
        all.iter().any(|item| item.equals(wanted.as_ref()))
    } else {
        this.equals(wanted.as_ref())
    };
    Ok(CowVal::owned(CelBool::from(found)))
}

fn contains_all(list: &[Box<dyn Val + '_>], wanted: &[Box<dyn Val + '_>]) -> bool {
    wanted
        .iter()
        .all(|w| list.iter().any(|item| item.equals(w.as_ref())))
}

fn set_contains<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [a, b] = take(args)?;
    let (a, b) = (items(a.as_ref())?, items(b.as_ref())?);
    Ok(CowVal::owned(CelBool::from(contains_all(&a, &b))))
}

fn set_equivalent<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [a, b] = take(args)?;
    let (a, b) = (items(a.as_ref())?, items(b.as_ref())?);
    Ok(CowVal::owned(CelBool::from(
        contains_all(&a, &b) && contains_all(&b, &a),
    )))
}

fn set_intersects<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [a, b] = take(args)?;
    let (a, b) = (items(a.as_ref())?, items(b.as_ref())?);
    let common = b
        .iter()
        .any(|w| a.iter().any(|item| item.equals(w.as_ref())));
    Ok(CowVal::owned(CelBool::from(common)))
}

// --- helpers of the comprehension macros ---

/// `[index, element]` of each element of a list, `[key, value]` of each entry of a map.
fn pairs<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [range] = take(args)?;
    let is_list = range.get_type() == &LIST_TYPE;
    let mut all: Vec<Box<dyn Val + 'v>> = Vec::new();
    for (index, item) in items(range.as_ref())?.into_iter().enumerate() {
        let two: Vec<Box<dyn Val + 'v>> = if is_list {
            let index = i64::try_from(index).unwrap_or(i64::MAX);
            vec![Box::new(CelInt::from(index)), item]
        } else {
            let indexer = range
                .as_indexer()
                .ok_or_else(|| failed("map", "no such overload"))?;
            let value = indexer.get(item.as_ref())?.into_owned();
            vec![item, value]
        };
        all.push(Box::new(CelList::from(two)));
    }
    Ok(list_of(all))
}

fn element<'b, 'v>(args: Vec<CowVal<'b, 'v>>, index: usize) -> Outcome<'b, 'v> {
    let [pair] = take(args)?;
    let item = items(pair.as_ref())?.into_iter().nth(index);
    item.map(CowVal::Owned)
        .ok_or_else(|| failed("pair", "index out of bounds"))
}

fn pair_key<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    element(args, 0)
}

fn pair_value<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    element(args, 1)
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "the signature of every CEL function"
)]
fn pair<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    Ok(list_of(args.into_iter().map(CowVal::into_owned).collect()))
}

/// A map of `[key, value]` pairs; a repeated key is an error.
fn to_map<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut map = HashMap::new();
    for pair in items(list.as_ref())? {
        let mut two = items(pair.as_ref())?.into_iter();
        if let (Some(key), Some(value)) = (two.next(), two.next()) {
            insert(&mut map, CowVal::Owned(key), value)?;
        }
    }
    Ok(CowVal::owned(CelMap::from(map)))
}

/// Merges a list of maps; a repeated key is an error.
fn merge<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut map = HashMap::new();
    for entries in items(list.as_ref())? {
        for key in items(entries.as_ref())? {
            let indexer = entries
                .as_indexer()
                .ok_or_else(|| failed("map", "no such overload"))?;
            let value = indexer.get(key.as_ref())?.into_owned();
            insert(&mut map, CowVal::Owned(key), value)?;
        }
    }
    Ok(CowVal::owned(CelMap::from(map)))
}

type Entries<'v> = HashMap<CelMapKey<'v>, Box<dyn Val + 'v>>;

fn insert<'v>(
    map: &mut Entries<'v>,
    key: CowVal<'_, 'v>,
    value: Box<dyn Val + 'v>,
) -> Result<(), ExecutionError> {
    let key = CelMapKey::try_from(key)?;
    match map.insert(key, value) {
        None => Ok(()),
        Some(_) => Err(failed("map", "insert failed: key already exists")),
    }
}
