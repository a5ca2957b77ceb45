//! Equality of versions and quantities with other types.
//!
//! To the interpreter values of different types are just not equal. Kubernetes' own types answer `no such overload`
//! instead, which fails the whole pod: `driverVersion == "580.95.5"` is such a mistake, and hiding it would make the
//! offline answer differ from the real one. Comparisons whose left side may be such a value (the type check knows)
//! therefore become calls of a stricter function.

use std::collections::BTreeSet;

use cel::common::ast::{EntryExpr, Expr, IdedExpr, operators};
use cel::common::types::{CelBool, DYN_TYPE, NULL_TYPE};
use cel::common::value::CowVal;
use cel::{DeclarationError, Env, ExecutionError};

use super::collections::take;
use super::library::Outcome;
use super::types::{QUANTITY, SEMVER};

/// The stricter `==`; nobody can write it.
const EQUAL: &str = "@equal";
/// The stricter `!=`.
const NOT_EQUAL: &str = "@notEqual";

/// Declares the strict comparisons.
pub(super) fn extension(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_overload(EQUAL, EQUAL, vec![DYN_TYPE, DYN_TYPE], equal)?;
    env.add_overload(NOT_EQUAL, NOT_EQUAL, vec![DYN_TYPE, DYN_TYPE], not_equal)
}

fn equal<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    compare(args, operators::EQUALS).map(|equal| CowVal::owned(CelBool::from(equal)))
}

fn not_equal<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    compare(args, operators::NOT_EQUALS).map(|equal| CowVal::owned(CelBool::from(!equal)))
}

fn compare(args: Vec<CowVal<'_, '_>>, operator: &str) -> Result<bool, ExecutionError> {
    let [left, right] = take(args)?;
    let (of_left, of_right) = (left.get_type(), right.get_type());
    let strict = *of_left == QUANTITY || *of_left == SEMVER;
    if strict && of_left != of_right && *of_right != NULL_TYPE {
        let types = vec![of_left.name().to_owned(), of_right.name().to_owned()];
        return Err(ExecutionError::no_such_overload(operator, types));
    }
    Ok(left.equals(right.as_ref()))
}

/// Makes the comparisons with these ids strict.
pub(super) fn make_strict(expr: &mut IdedExpr, ids: &BTreeSet<u64>) {
    if ids.is_empty() {
        return;
    }
    let id = expr.id;
    match &mut expr.expr {
        Expr::Call(call) => {
            if ids.contains(&id) {
                match call.func_name.as_str() {
                    operators::EQUALS => EQUAL.clone_into(&mut call.func_name),
                    operators::NOT_EQUALS => NOT_EQUAL.clone_into(&mut call.func_name),
                    _ => {}
                }
            }
            call.target.iter_mut().for_each(|target| make_strict(target, ids));
            call.args.iter_mut().for_each(|arg| make_strict(arg, ids));
        }
        Expr::Comprehension(c) => {
            for part in
                [&mut c.iter_range, &mut c.accu_init, &mut c.loop_cond, &mut c.loop_step, &mut c.result]
            {
                make_strict(part, ids);
            }
        }
        Expr::List(list) => list.elements.iter_mut().for_each(|element| make_strict(element, ids)),
        Expr::Map(map) => {
            for entry in &mut map.entries {
                if let EntryExpr::MapEntry(entry) = &mut entry.expr {
                    make_strict(&mut entry.key, ids);
                    make_strict(&mut entry.value, ids);
                }
            }
        }
        Expr::Select(select) => make_strict(&mut select.operand, ids),
        Expr::Ident(_) | Expr::Literal(_) | Expr::Struct(_) | Expr::Unspecified => {}
    }
}
