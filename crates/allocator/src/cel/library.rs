//! The functions that Kubernetes adds to CEL and that the interpreter does not bring: quantity, semver and regex.

use std::cmp::Ordering;

use cel::common::types::{CelBool, CelDouble, CelInt, CelString, STRING_TYPE};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};

use super::collections::{list_of, take};
use super::{collections, regexes, types};
use crate::{Format, Quantity, Semver};

/// What a function of the environment gives.
pub(super) type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

/// Declares everything of this module.
pub(super) fn extension(env: &mut Env) -> Result<(), DeclarationError> {
    quantities(env)?;
    versions(env)?;
    collections::declare(env)?;
    add_member_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>)?;
    add_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>)?;
    add_member_overload!(env, fn find: (CelString, CelString) -> Result<CelString>)?;
    env.add_member_overload("findAll", "find_all", STRING_TYPE, vec![STRING_TYPE], find_all)
}

/// The error of a function.
pub(super) fn failed(function: &str, error: impl std::fmt::Display) -> ExecutionError {
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
    // A global function, unlike the others: so Kubernetes declares it.
    add_overload!(env, fn sign: (Quantity) -> CelInt)?;
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
    let (Some(text), Some(pattern)) = (this.downcast_ref::<CelString>(), pattern.downcast_ref::<CelString>())
    else {
        return Err(failed("findAll", "no such overload"));
    };
    let regex = regexes::compiled(pattern.inner()).map_err(|e| failed("findAll", e))?;
    let found = regex.find_iter(text.inner()).map(|m| CelString::from(m.as_str().to_owned()));
    Ok(list_of(found.map(|text| Box::new(text) as Box<dyn Val + 'v>).collect()))
}
