//! Equality of versions and quantities with other types.
//!
//! To the interpreter values of different types are just not equal. Kubernetes' own types answer
//! `no such overload` to `==` instead, which fails the whole pod: `driverVersion == "580.95.5"` is
//! such a mistake. cel-go's `!=` turns that error into true. All comparisons therefore become calls
//! of stricter functions.

use cel::common::ast::{CallExpr, operators};
use cel::common::types::{CelBool, DYN_TYPE, NULL_TYPE};
use cel::common::value::{CowVal, Val};
use cel::{DeclarationError, Env, ExecutionError};

use super::collections::take;
use super::library::Outcome;
use super::types::{QUANTITY, SEMVER};

/// The stricter `==`; it cannot be written in an expression.
const EQUAL: &str = "@equal";
/// The stricter `!=`.
const NOT_EQUAL: &str = "@notEqual";

/// Declares the strict comparisons.
pub(super) fn extension(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_overload(EQUAL, EQUAL, vec![DYN_TYPE, DYN_TYPE], equal)?;
    env.add_overload(NOT_EQUAL, NOT_EQUAL, vec![DYN_TYPE, DYN_TYPE], not_equal)
}

fn equal<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [left, right] = take(args)?;
    let (of_left, of_right) = (left.get_type(), right.get_type());
    if of_left != of_right && *of_right != NULL_TYPE && (*of_left == QUANTITY || *of_left == SEMVER)
    {
        let types = vec![of_left.name().to_owned(), of_right.name().to_owned()];
        return Err(ExecutionError::no_such_overload(operators::EQUALS, types));
    }
    Ok(CowVal::owned(CelBool::from(are_equal(
        left.as_ref(),
        right.as_ref(),
    ))))
}

fn not_equal<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let [left, right] = take(args)?;
    Ok(CowVal::owned(CelBool::from(!are_equal(
        left.as_ref(),
        right.as_ref(),
    ))))
}

/// In both directions: a map literal does not know the maps of a device.
fn are_equal(left: &dyn Val, right: &dyn Val) -> bool {
    left.equals(right) || right.equals(left)
}

/// Replaces a comparison by its strict function.
pub(super) fn make_strict(call: &mut CallExpr) {
    match call.func_name.as_str() {
        operators::EQUALS => EQUAL.clone_into(&mut call.func_name),
        operators::NOT_EQUALS => NOT_EQUAL.clone_into(&mut call.func_name),
        _ => {}
    }
}
