//! Steps between the parser and the interpreter of an expression.
//!
//! The API server type-checks selectors before it stores them; a cluster's claims and classes have
//! passed that. Here only those of its refusals are repeated that an evaluation would turn into an
//! answer: comparisons and literals of types that are known not to match.

use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedExpr, LiteralValue, operators};

use super::macros::OPTIONAL;
use super::{CelError, equality};

/// Deepest nesting of an expression: brackets count for [`BRACKET`], operators for one. The stack
/// of any thread has room for that; selectors that people write stay far below.
const MAX_DEPTH: usize = 200;
const BRACKET: usize = 8;

/// Functions and namespaces of Kubernetes' CEL that this evaluator does not have.
const OFFLINE: [&str; 9] = [
    "cidr",
    "duration",
    "format",
    "ip",
    "isCIDR",
    "isIP",
    "isURL",
    "timestamp",
    "url",
];

const DEVICE: &str = "kubernetes.DRADevice";
const DYN: &str = "dyn";
const ATTRIBUTES: &str = "map(string, map(string, any))";
const ATTRIBUTES_OF_DOMAIN: &str = "map(string, any)";
const CAPACITIES: &str = "map(string, map(string, kubernetes.Quantity))";
const CAPACITIES_OF_DOMAIN: &str = "map(string, kubernetes.Quantity)";
const QUANTITY: &str = "kubernetes.Quantity";
const SEMVER: &str = "kubernetes.Semver";

/// Types of which no value equals one of another.
const SCALARS: [&str; 8] = [
    "bool", "bytes", "double", "int", "string", "uint", QUANTITY, SEMVER,
];

/// Refuses an expression that might overflow the stack of the parser or the interpreter. Text in
/// strings counts as if it were code: that is simple, and errs on the safe side.
pub(super) fn check_depth(expression: &str) -> Result<(), CelError> {
    let (mut open, mut chain, mut conditionals) = (0_usize, 0_usize, 0_usize);
    for c in expression.chars() {
        match c {
            '[' | '(' | '{' => open += BRACKET,
            ']' | ')' | '}' => open = open.saturating_sub(BRACKET),
            // Their operands are trees of their own, which the parser balances.
            '&' | '|' | ',' => chain = 0,
            '?' => conditionals += 1,
            '+' | '-' | '*' | '/' | '%' | '<' | '>' | '=' | '!' | '.' => chain += 1,
            _ => {}
        }
        // A call or index at the end of a chain closes its bracket but still nests.
        if matches!(c, '[' | '(' | '{') {
            chain += 1;
        }
        if open + chain + conditionals > MAX_DEPTH {
            return Err(CelError::Offline("it nests too deeply".to_owned()));
        }
    }
    Ok(())
}

/// Checks a parsed expression and makes its comparisons strict.
pub(super) fn prepare(expr: &mut IdedExpr) -> Result<(), CelError> {
    match &expr.expr {
        Expr::Call(call) => check_call(call)?,
        Expr::List(list) if list.optional_indices.is_empty() => homogeneous(list.elements.iter())?,
        Expr::Map(map) => {
            let entries = || {
                map.entries
                    .iter()
                    .filter_map(|entry| entry_parts(&entry.expr))
            };
            homogeneous(entries().map(|(key, _)| key))?;
            homogeneous(entries().map(|(_, value)| value))?;
        }
        _ => {}
    }
    // The arguments of `format` may be of any types.
    let is_format = matches!(&expr.expr, Expr::Call(call) if call.func_name == "format");
    for child in children(&mut expr.expr) {
        match &mut child.expr {
            Expr::List(list) if is_format => list.elements.iter_mut().try_for_each(prepare)?,
            _ => prepare(child)?,
        }
    }
    if let Expr::Call(call) = &mut expr.expr {
        equality::make_strict(call);
    }
    Ok(())
}

fn check_call(call: &CallExpr) -> Result<(), CelError> {
    let namespace = call.target.as_ref().and_then(|target| match &target.expr {
        Expr::Ident(name) => Some(name.as_str()),
        _ => None,
    });
    let name = match (namespace, call.target.is_some()) {
        (Some(namespace), _) => namespace,
        (None, true) => return Ok(()),
        (None, false) => call.func_name.as_str(),
    };
    if OFFLINE.contains(&name) {
        return Err(CelError::Offline(format!("it uses `{name}`")));
    }
    let (left, right) = match (call.func_name.as_str(), call.args.as_slice()) {
        (operators::EQUALS | operators::NOT_EQUALS, [left, right]) => (left, right),
        (
            operators::IN,
            [
                left,
                IdedExpr {
                    expr: Expr::List(list),
                    ..
                },
            ],
        ) => match list.elements.first() {
            Some(first) => (left, first),
            None => return Ok(()),
        },
        _ => return Ok(()),
    };
    match (static_type(left), static_type(right)) {
        (Some(left), Some(right)) if left != right && are_incomparable(left, right) => {
            let operator = &call.func_name;
            let types = format!("({left}, {right})");
            Err(CelError::Compile(format!(
                "found no matching overload for '{operator}' applied to '{types}'"
            )))
        }
        _ => Ok(()),
    }
}

/// Says whether a comparison of two different types is refused; Kubernetes' own types may be
/// compared
/// with null.
fn are_incomparable(left: &str, right: &str) -> bool {
    let is_null = |ty: &str| ty == "null";
    let is_own = |ty: &str| [QUANTITY, SEMVER].contains(&ty);
    let both = [left, right]
        .iter()
        .all(|ty| SCALARS.contains(ty) || is_null(ty));
    both && !(is_null(left) && is_own(right)) && !(is_own(left) && is_null(right))
}

/// Refuses a list or map whose elements are known to have different types.
fn homogeneous<'e>(elements: impl Iterator<Item = &'e IdedExpr>) -> Result<(), CelError> {
    let mut types = elements.filter_map(static_type);
    let Some(first) = types.next() else {
        return Ok(());
    };
    match types.find(|ty| *ty != first) {
        None => Ok(()),
        Some(other) => {
            let hint = if [first, other].contains(&DYN) {
                "; an attribute can be of any type: compare it with each value by itself"
            } else {
                ""
            };
            Err(CelError::Compile(format!(
                "expected type '{first}' but found '{other}'{hint}"
            )))
        }
    }
}

/// The type of an expression as the API server's check has it, where that is certain.
fn static_type(expr: &IdedExpr) -> Option<&'static str> {
    match &expr.expr {
        Expr::Literal(literal) => Some(match literal {
            LiteralValue::Boolean(_) => "bool",
            LiteralValue::Bytes(_) => "bytes",
            LiteralValue::Double(_) => "double",
            LiteralValue::Int(_) => "int",
            LiteralValue::Null => "null",
            LiteralValue::String(_) => "string",
            LiteralValue::UInt(_) => "uint",
        }),
        Expr::Ident(name) => (name == "device").then_some(DEVICE),
        Expr::Select(select) if select.test => Some("bool"),
        Expr::Select(select) => match (static_type(&select.operand)?, select.field.as_str()) {
            (DEVICE, "driver") => Some("string"),
            (DEVICE, "attributes") => Some(ATTRIBUTES),
            (DEVICE, "capacity") => Some(CAPACITIES),
            (DEVICE, "allowMultipleAllocations") => Some("bool"),
            (ty, _) => element(ty),
        },
        // `map.?id.orValue(…)`, expanded: what the map holds.
        Expr::Comprehension(bind) if bind.accu_var == OPTIONAL => match &bind.accu_init.expr {
            Expr::Call(select) if select.func_name == operators::OPT_SELECT => {
                element(static_type(select.args.first()?)?)
            }
            _ => None,
        },
        Expr::Call(call) => match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::INDEX, [of, _]) => element(static_type(of)?),
            (
                operators::EQUALS
                | operators::NOT_EQUALS
                | operators::IN
                | operators::LESS
                | operators::LESS_EQUALS
                | operators::GREATER
                | operators::GREATER_EQUALS
                | operators::LOGICAL_AND
                | operators::LOGICAL_OR
                | operators::LOGICAL_NOT
                | "matches"
                | "startsWith"
                | "endsWith",
                _,
            ) => Some("bool"),
            ("quantity", _) => Some(QUANTITY),
            ("semver", _) => Some(SEMVER),
            ("string" | "lowerAscii" | "upperAscii" | "trim", _) => Some("string"),
            (
                "int" | "size" | "compareTo" | "sign" | "asInteger" | "major" | "minor" | "patch",
                _,
            ) => Some("int"),
            _ => None,
        },
        _ => None,
    }
}

/// Content of a map.
fn element(ty: &str) -> Option<&'static str> {
    match ty {
        ATTRIBUTES => Some(ATTRIBUTES_OF_DOMAIN),
        ATTRIBUTES_OF_DOMAIN => Some(DYN),
        CAPACITIES => Some(CAPACITIES_OF_DOMAIN),
        CAPACITIES_OF_DOMAIN => Some(QUANTITY),
        _ => None,
    }
}

pub(super) fn entry_parts(entry: &EntryExpr) -> Option<(&IdedExpr, &IdedExpr)> {
    match entry {
        EntryExpr::MapEntry(entry) => Some((&entry.key, &entry.value)),
        EntryExpr::StructField(_) => None,
    }
}

fn children(expr: &mut Expr) -> Vec<&mut IdedExpr> {
    match expr {
        Expr::Call(call) => call
            .target
            .iter_mut()
            .map(Box::as_mut)
            .chain(&mut call.args)
            .collect(),
        Expr::Comprehension(c) => {
            vec![
                &mut c.iter_range,
                &mut c.accu_init,
                &mut c.loop_cond,
                &mut c.loop_step,
                &mut c.result,
            ]
        }
        Expr::List(list) => list.elements.iter_mut().collect(),
        Expr::Map(map) => {
            let entries = map
                .entries
                .iter_mut()
                .filter_map(|entry| match &mut entry.expr {
                    EntryExpr::MapEntry(entry) => Some([&mut entry.key, &mut entry.value]),
                    EntryExpr::StructField(_) => None,
                });
            entries.flatten().collect()
        }
        Expr::Select(select) => vec![&mut select.operand],
        Expr::Ident(_) | Expr::Literal(_) | Expr::Struct(_) | Expr::Unspecified => Vec::new(),
    }
}
