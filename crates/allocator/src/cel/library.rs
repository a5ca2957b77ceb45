//! The functions that Kubernetes adds to CEL and that the interpreter does not bring: quantity,
//! semver and regex.

use std::cmp::Ordering;

use cel::common::types::{CelBool, CelDouble, CelInt, CelString, STRING_TYPE};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};

use super::collections::{list_of, take};
use super::types::CelQuantity;
use super::{collections, regexes, types};
use divvy_model::{Format, Quantity};

use crate::Semver;

/// Result of a function of the environment.
pub(super) type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

/// Declares everything of this module.
pub(super) fn extension(env: &mut Env) -> Result<(), DeclarationError> {
    quantities(env)?;
    versions(env)?;
    collections::declare(env)?;
    add_member_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>)?;
    add_overload!(env, fn matches: (CelString, CelString) -> Result<CelBool>)?;
    add_member_overload!(env, fn find: (CelString, CelString) -> Result<CelString>)?;
    env.add_member_overload(
        "findAll",
        "find_all",
        STRING_TYPE,
        vec![STRING_TYPE],
        find_all,
    )
}

/// The error of a function.
pub(super) fn failed(function: &str, error: impl std::fmt::Display) -> ExecutionError {
    ExecutionError::function_error(function, error)
}

fn int(value: u64, function: &str) -> Result<CelInt, ExecutionError> {
    i64::try_from(value)
        .map(CelInt::from)
        .map_err(|_| failed(function, "integer overflow"))
}

fn ordering(order: Ordering) -> CelInt {
    CelInt::from(order as i64)
}

// --- quantity ---

fn quantities(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_type(types::QUANTITY.to_owned())?;
    add_overload!(env, fn quantity: (CelString) -> Result<CelQuantity>)?;
    add_overload!(env, fn is_quantity: (CelString) -> CelBool)?;
    // A global function, unlike the others: so Kubernetes declares it.
    add_overload!(env, fn sign: (CelQuantity) -> CelInt)?;
    add_member_overload!(env, fn is_integer: (CelQuantity) -> CelBool)?;
    add_member_overload!(env, fn as_integer: (CelQuantity) -> Result<CelInt>)?;
    add_member_overload!(env, fn as_approximate_float: (CelQuantity) -> CelDouble)?;
    add_member_overload!(env, fn q_greater: (CelQuantity, CelQuantity) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn q_less: (CelQuantity, CelQuantity) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn q_compare: (CelQuantity, CelQuantity) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn q_add: (CelQuantity, CelQuantity) -> Result<CelQuantity>, name = "add")?;
    add_member_overload!(env, fn q_sub: (CelQuantity, CelQuantity) -> Result<CelQuantity>, name = "sub")?;
    add_member_overload!(env, fn q_add_int: (CelQuantity, CelInt) -> Result<CelQuantity>, name = "add")?;
    add_member_overload!(env, fn q_sub_int: (CelQuantity, CelInt) -> Result<CelQuantity>, name = "sub")
}

fn quantity(text: &CelString<'_>) -> Result<CelQuantity, ExecutionError> {
    text.inner()
        .parse()
        .map(CelQuantity)
        .map_err(|e| failed("quantity", e))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    CelBool::from(text.inner().parse::<Quantity>().is_ok())
}

fn sign(this: &CelQuantity) -> CelInt {
    CelInt::from(this.0.signum())
}

fn is_integer(this: &CelQuantity) -> CelBool {
    CelBool::from(this.0.to_i64().is_some())
}

fn as_integer(this: &CelQuantity) -> Result<CelInt, ExecutionError> {
    let value = this
        .0
        .to_i64()
        .ok_or_else(|| failed("asInteger", "cannot convert value to integer"))?;
    Ok(CelInt::from(value))
}

fn as_approximate_float(this: &CelQuantity) -> CelDouble {
    CelDouble::from(this.0.to_f64())
}

fn q_greater(this: &CelQuantity, other: &CelQuantity) -> CelBool {
    CelBool::from(this.0 > other.0)
}

fn q_less(this: &CelQuantity, other: &CelQuantity) -> CelBool {
    CelBool::from(this.0 < other.0)
}

fn q_compare(this: &CelQuantity, other: &CelQuantity) -> CelInt {
    ordering(this.0.cmp(&other.0))
}

fn q_add(this: &CelQuantity, other: &CelQuantity) -> Result<CelQuantity, ExecutionError> {
    this.0
        .checked_add(&other.0)
        .map(CelQuantity)
        .ok_or_else(|| failed("add", "quantity out of range"))
}

fn q_sub(this: &CelQuantity, other: &CelQuantity) -> Result<CelQuantity, ExecutionError> {
    this.0
        .checked_sub(&other.0)
        .map(CelQuantity)
        .ok_or_else(|| failed("sub", "quantity out of range"))
}

fn q_add_int(this: &CelQuantity, other: &CelInt) -> Result<CelQuantity, ExecutionError> {
    q_add(
        this,
        &CelQuantity(Quantity::from_units(*other.inner(), Format::DecimalSi)),
    )
}

fn q_sub_int(this: &CelQuantity, other: &CelInt) -> Result<CelQuantity, ExecutionError> {
    q_sub(
        this,
        &CelQuantity(Quantity::from_units(*other.inner(), Format::DecimalSi)),
    )
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
    if lenient {
        Semver::parse_lenient(text)
    } else {
        text.parse()
    }
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

fn find(
    this: &CelString<'_>,
    pattern: &CelString<'_>,
) -> Result<CelString<'static>, ExecutionError> {
    let regex = regexes::compiled(pattern.inner()).map_err(|e| failed("find", e))?;
    let found = regex
        .find(this.inner())
        .map(|m| m.as_str())
        .unwrap_or_default();
    Ok(CelString::from(found.to_owned()))
}

fn find_all<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [this, pattern] = take(args)?;
    let (Some(text), Some(pattern)) = (
        this.downcast_ref::<CelString>(),
        pattern.downcast_ref::<CelString>(),
    ) else {
        return Err(failed("findAll", "no such overload"));
    };
    let regex = regexes::compiled(pattern.inner()).map_err(|e| failed("findAll", e))?;
    let found = regex
        .find_iter(text.inner())
        .map(|m| CelString::from(m.as_str().to_owned()));
    Ok(list_of(
        found
            .map(|text| Box::new(text) as Box<dyn Val + 'v>)
            .collect(),
    ))
}
