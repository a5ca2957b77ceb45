//! The functions that Kubernetes adds to CEL and that the interpreter does not bring: quantity, semver, regex,
//! lists and sets.

use std::cmp::Ordering;

use cel::common::types::{
    CelBool, CelDouble, CelInt, CelList, CelOptional, CelString, DYN_TYPE, LIST_TYPE, MAP_TYPE,
};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};

use super::{regexes, types};
use crate::{Format, Quantity, Semver};

/// What a function of the environment gives.
type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

/// Declares everything of this module.
pub(super) fn extension(env: &mut Env) -> Result<(), DeclarationError> {
    quantities(env)?;
    versions(env)?;
    lists(env)?;
    add_member_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>)?;
    add_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>)?;
    add_member_overload!(env, fn find: (CelString, CelString) -> Result<CelString>)?;
    env.add_member_overload(
        "findAll",
        "find_all",
        cel::common::types::STRING_TYPE,
        vec![cel::common::types::STRING_TYPE],
        find_all,
    )
}

fn failed(function: &str, error: impl std::fmt::Display) -> ExecutionError {
    ExecutionError::function_error(function, error)
}

fn int(value: u64, function: &str) -> Result<CelInt, ExecutionError> {
    i64::try_from(value).map(CelInt::from).map_err(|_| failed(function, "integer overflow"))
}

fn ordering(order: Ordering) -> CelInt {
    CelInt::from(order as i64)
}

// --- quantity ---

fn quantities(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_type(types::QUANTITY.to_owned())?;
    add_overload!(env, fn quantity: (CelString) -> Result<Quantity>)?;
    add_overload!(env, fn is_quantity: (CelString) -> CelBool)?;
    add_member_overload!(env, fn sign: (Quantity) -> CelInt)?;
    add_member_overload!(env, fn is_integer: (Quantity) -> CelBool)?;
    add_member_overload!(env, fn as_integer: (Quantity) -> Result<CelInt>)?;
    add_member_overload!(env, fn as_approximate_float: (Quantity) -> CelDouble)?;
    add_member_overload!(env, fn q_greater: (Quantity, Quantity) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn q_less: (Quantity, Quantity) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn q_compare: (Quantity, Quantity) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn q_add: (Quantity, Quantity) -> Result<Quantity>, name = "add")?;
    add_member_overload!(env, fn q_sub: (Quantity, Quantity) -> Result<Quantity>, name = "sub")?;
    add_member_overload!(env, fn q_add_int: (Quantity, CelInt) -> Result<Quantity>, name = "add")?;
    add_member_overload!(env, fn q_sub_int: (Quantity, CelInt) -> Result<Quantity>, name = "sub")
}

fn quantity(text: &CelString<'_>) -> Result<Quantity, ExecutionError> {
    text.inner().parse().map_err(|e| failed("quantity", e))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    CelBool::from(text.inner().parse::<Quantity>().is_ok())
}

fn sign(this: &Quantity) -> CelInt {
    CelInt::from(this.signum())
}

fn is_integer(this: &Quantity) -> CelBool {
    CelBool::from(this.to_i64().is_some())
}

fn as_integer(this: &Quantity) -> Result<CelInt, ExecutionError> {
    let value = this.to_i64().ok_or_else(|| failed("asInteger", "cannot convert value to integer"))?;
    Ok(CelInt::from(value))
}

fn as_approximate_float(this: &Quantity) -> CelDouble {
    CelDouble::from(this.to_f64())
}

fn q_greater(this: &Quantity, other: &Quantity) -> CelBool {
    CelBool::from(this > other)
}

fn q_less(this: &Quantity, other: &Quantity) -> CelBool {
    CelBool::from(this < other)
}

fn q_compare(this: &Quantity, other: &Quantity) -> CelInt {
    ordering(this.cmp(other))
}

fn q_add(this: &Quantity, other: &Quantity) -> Result<Quantity, ExecutionError> {
    this.checked_add(other).ok_or_else(|| failed("add", "quantity out of range"))
}

fn q_sub(this: &Quantity, other: &Quantity) -> Result<Quantity, ExecutionError> {
    this.checked_sub(other).ok_or_else(|| failed("sub", "quantity out of range"))
}

fn q_add_int(this: &Quantity, other: &CelInt) -> Result<Quantity, ExecutionError> {
    q_add(this, &Quantity::from_units(*other.inner(), Format::DecimalSi))
}

fn q_sub_int(this: &Quantity, other: &CelInt) -> Result<Quantity, ExecutionError> {
    q_sub(this, &Quantity::from_units(*other.inner(), Format::DecimalSi))
}

// --- semver ---

fn versions(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_type(types::SEMVER.to_owned())?;
    add_overload!(env, fn semver: (CelString) -> Result<Semver>)?;
    add_overload!(env, fn semver_lenient: (CelString, CelBool) -> Result<Semver>, name = "semver")?;
    add_overload!(env, fn is_semver: (CelString) -> CelBool)?;
    add_overload!(env, fn is_semver_lenient: (CelString, CelBool) -> CelBool, name = "isSemver")?;
    add_member_overload!(env, fn major: (Semver) -> Result<CelInt>)?;
    add_member_overload!(env, fn minor: (Semver) -> Result<CelInt>)?;
    add_member_overload!(env, fn patch: (Semver) -> Result<CelInt>)?;
    add_member_overload!(env, fn v_greater: (Semver, Semver) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn v_less: (Semver, Semver) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn v_compare: (Semver, Semver) -> CelInt, name = "compareTo")
}

fn read_version(text: &str, lenient: bool) -> Result<Semver, crate::SemverError> {
    if lenient { Semver::parse_lenient(text) } else { text.parse() }
}

fn semver(text: &CelString<'_>) -> Result<Semver, ExecutionError> {
    read_version(text.inner(), false).map_err(|e| failed("semver", e))
}

fn semver_lenient(text: &CelString<'_>, lenient: &CelBool) -> Result<Semver, ExecutionError> {
    read_version(text.inner(), *lenient.inner()).map_err(|e| failed("semver", e))
}

fn is_semver(text: &CelString<'_>) -> CelBool {
    CelBool::from(read_version(text.inner(), false).is_ok())
}

fn is_semver_lenient(text: &CelString<'_>, lenient: &CelBool) -> CelBool {
    CelBool::from(read_version(text.inner(), *lenient.inner()).is_ok())
}

fn major(this: &Semver) -> Result<CelInt, ExecutionError> {
    int(this.major(), "major")
}

fn minor(this: &Semver) -> Result<CelInt, ExecutionError> {
    int(this.minor(), "minor")
}

fn patch(this: &Semver) -> Result<CelInt, ExecutionError> {
    int(this.patch(), "patch")
}

fn v_greater(this: &Semver, other: &Semver) -> CelBool {
    CelBool::from(this > other)
}

fn v_less(this: &Semver, other: &Semver) -> CelBool {
    CelBool::from(this < other)
}

fn v_compare(this: &Semver, other: &Semver) -> CelInt {
    ordering(this.cmp(other))
}

// --- regex ---

fn matches(this: &CelString<'_>, pattern: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    let regex = regexes::compiled(pattern.inner()).map_err(|e| failed("matches", e))?;
    Ok(CelBool::from(regex.is_match(this.inner())))
}

fn find(this: &CelString<'_>, pattern: &CelString<'_>) -> Result<CelString<'static>, ExecutionError> {
    let regex = regexes::compiled(pattern.inner()).map_err(|e| failed("find", e))?;
    let found = regex.find(this.inner()).map(|m| m.as_str()).unwrap_or_default();
    Ok(CelString::from(found.to_owned()))
}

fn find_all<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [this, pattern] = take(args)?;
    let (Some(text), Some(pattern)) =
        (this.downcast_ref::<CelString>(), pattern.downcast_ref::<CelString>())
    else {
        return Err(failed("findAll", "no such overload"));
    };
    let regex = regexes::compiled(pattern.inner()).map_err(|e| failed("findAll", e))?;
    let found = regex.find_iter(text.inner()).map(|m| CelString::from(m.as_str().to_owned()));
    Ok(list_of(found.map(|text| Box::new(text) as Box<dyn Val + 'v>).collect()))
}

// --- lists and sets ---

fn lists(env: &mut Env) -> Result<(), DeclarationError> {
    for (name, function) in [
        ("isSorted", is_sorted as cel::common::functions::Function),
        ("sum", sum),
        ("min", smallest),
        ("max", largest),
        ("first", first),
        ("last", last),
    ] {
        env.add_member_overload(name, &format!("list_{name}"), LIST_TYPE, vec![], function)?;
    }
    env.add_member_overload("indexOf", "list_indexOf", LIST_TYPE, vec![DYN_TYPE], index_of)?;
    env.add_member_overload("lastIndexOf", "list_lastIndexOf", LIST_TYPE, vec![DYN_TYPE], last_index_of)?;
    env.add_member_overload("includes", "dyn_includes", DYN_TYPE, vec![DYN_TYPE], includes)?;
    for (name, function) in [
        ("sets.contains", set_contains as cel::common::functions::Function),
        ("sets.equivalent", set_equivalent),
        ("sets.intersects", set_intersects),
    ] {
        env.add_overload(name, name, vec![LIST_TYPE, LIST_TYPE], function)?;
    }
    // What the comprehension macros expand to; `@` cannot be written in an expression.
    env.add_overload("@pairs", "list_pairs", vec![LIST_TYPE], pairs)?;
    env.add_overload("@pairs", "map_pairs", vec![MAP_TYPE], pairs)?;
    env.add_overload("@key", "pair_key", vec![LIST_TYPE], pair_key)?;
    env.add_overload("@value", "pair_value", vec![LIST_TYPE], pair_value)?;
    env.add_overload("@pair", "pair", vec![DYN_TYPE, DYN_TYPE], pair)?;
    env.add_overload("@toMap", "list_to_map", vec![LIST_TYPE], to_map)?;
    env.add_overload("@merge", "list_merge", vec![LIST_TYPE], merge)
}

fn take<'b, 'v, const N: usize>(args: Vec<CowVal<'b, 'v>>) -> Result<[CowVal<'b, 'v>; N], ExecutionError> {
    args.try_into().map_err(|args: Vec<_>| ExecutionError::invalid_argument_count(N, args.len()))
}

fn list_of<'b, 'v>(items: Vec<Box<dyn Val + 'v>>) -> CowVal<'b, 'v> {
    CowVal::owned(CelList::from(items))
}

/// The elements of a list, or the keys of a map.
fn items<'v>(list: &(dyn Val + 'v)) -> Result<Vec<Box<dyn Val + 'v>>, ExecutionError> {
    let iterable = list.as_iterable().ok_or_else(|| failed("list", "no such overload"))?;
    let mut iter = iterable.iter();
    let mut all = Vec::new();
    while let Some(item) = iter.next() {
        all.push(item.clone_as_boxed());
    }
    Ok(all)
}

fn compare(a: &dyn Val, b: &dyn Val) -> Result<Ordering, ExecutionError> {
    let comparer = a.as_comparer().ok_or_else(|| failed("list", "no such overload"))?;
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
    let Some(mut total) = all.next() else { return Ok(CowVal::owned(CelInt::from(0))) };
    for item in all {
        let adder = total.as_adder().ok_or_else(|| failed("sum", "no such overload"))?;
        total = adder.add(item.as_ref())?.into_owned();
    }
    Ok(CowVal::Owned(total))
}

fn extreme<'b, 'v>(args: Vec<CowVal<'b, 'v>>, name: &str, wanted: Ordering) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut all = items(list.as_ref())?.into_iter();
    let mut best = all.next().ok_or_else(|| failed(name, format!("{name} called on empty list")))?;
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
    Ok(CowVal::owned(position(all.iter().position(|item| item.equals(wanted.as_ref())))))
}

fn last_index_of<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list, wanted] = take(args)?;
    let all = items(list.as_ref())?;
    Ok(CowVal::owned(position(all.iter().rposition(|item| item.equals(wanted.as_ref())))))
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
    wanted.iter().all(|w| list.iter().any(|item| item.equals(w.as_ref())))
}

fn set_contains<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [a, b] = take(args)?;
    let (a, b) = (items(a.as_ref())?, items(b.as_ref())?);
    Ok(CowVal::owned(CelBool::from(contains_all(&a, &b))))
}

fn set_equivalent<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [a, b] = take(args)?;
    let (a, b) = (items(a.as_ref())?, items(b.as_ref())?);
    Ok(CowVal::owned(CelBool::from(contains_all(&a, &b) && contains_all(&b, &a))))
}

fn set_intersects<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [a, b] = take(args)?;
    let (a, b) = (items(a.as_ref())?, items(b.as_ref())?);
    let common = b.iter().any(|w| a.iter().any(|item| item.equals(w.as_ref())));
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
            let indexer = range.as_indexer().ok_or_else(|| failed("map", "no such overload"))?;
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
    item.map(CowVal::Owned).ok_or_else(|| failed("pair", "index out of bounds"))
}

fn pair_key<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    element(args, 0)
}

fn pair_value<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    element(args, 1)
}

fn pair<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    Ok(list_of(args.into_iter().map(CowVal::into_owned).collect()))
}

/// A map of `[key, value]` pairs; a repeated key is an error.
fn to_map<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut map = std::collections::HashMap::new();
    for pair in items(list.as_ref())? {
        let mut two = items(pair.as_ref())?.into_iter();
        if let (Some(key), Some(value)) = (two.next(), two.next()) {
            insert(&mut map, CowVal::Owned(key), value)?;
        }
    }
    Ok(CowVal::owned(cel::common::types::CelMap::from(map)))
}

/// One map out of a list of maps; a repeated key is an error.
fn merge<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [list] = take(args)?;
    let mut map = std::collections::HashMap::new();
    for entries in items(list.as_ref())? {
        for key in items(entries.as_ref())? {
            let indexer = entries.as_indexer().ok_or_else(|| failed("map", "no such overload"))?;
            let value = indexer.get(key.as_ref())?.into_owned();
            insert(&mut map, CowVal::Owned(key), value)?;
        }
    }
    Ok(CowVal::owned(cel::common::types::CelMap::from(map)))
}

type Entries<'v> = std::collections::HashMap<cel::common::types::CelMapKey<'v>, Box<dyn Val + 'v>>;

fn insert<'v>(
    map: &mut Entries<'v>,
    key: CowVal<'_, 'v>,
    value: Box<dyn Val + 'v>,
) -> Result<(), ExecutionError> {
    let key = cel::common::types::CelMapKey::try_from(key)?;
    match map.insert(key, value) {
        None => Ok(()),
        Some(_) => Err(failed("map", "insert failed: key already exists")),
    }
}
