//! The worst cost of an expression, as the API server estimates it before it stores a selector.
//!
//! A port of cel-go's `checker.Cost` with the estimators of Kubernetes' library and of its device
//! selectors: only the upper bound, since nothing reads the lower one. The types that cel-go takes
//! from its checker are known here as far as an estimate depends on them. `transformMap`,
//! `transformMapEntry` and functions that this evaluator does not have are counted as one call.

use cel::common::ast::{CallExpr, ComprehensionExpr, Expr, IdedExpr, LiteralValue, operators};

use super::macros::OPTIONAL;

/// The highest cost that the API server takes.
pub(crate) const LIMIT: u64 = 1_000_000;

const CREATE_LIST: u64 = 10;
const CREATE_MAP: u64 = 30;
const CREATE_STRUCT: u64 = 40;
/// A size of which nothing is known.
const UNKNOWN: u64 = u64::MAX;

/// A part of `device`, of which the API limits the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Device,
    Driver,
    Shared,
    /// Attributes or capacities, by domain.
    Domains {
        of_attributes: bool,
    },
    /// Attributes or capacities of one domain, by name.
    Names {
        of_attributes: bool,
    },
    Attribute,
    Capacity,
    Domain,
    Name,
}

impl Place {
    /// Returns the part behind a field, a key or an index.
    fn value(self, field: Option<&str>) -> Option<Self> {
        match (self, field) {
            (Self::Device, Some("driver")) => Some(Self::Driver),
            (Self::Device, Some("allowMultipleAllocations")) => Some(Self::Shared),
            (Self::Device, Some("attributes")) => Some(Self::Domains {
                of_attributes: true,
            }),
            (Self::Device, Some("capacity")) => Some(Self::Domains {
                of_attributes: false,
            }),
            (Self::Domains { of_attributes }, _) => Some(Self::Names { of_attributes }),
            (
                Self::Names {
                    of_attributes: true,
                },
                _,
            ) => Some(Self::Attribute),
            (
                Self::Names {
                    of_attributes: false,
                },
                _,
            ) => Some(Self::Capacity),
            _ => None,
        }
    }

    /// Returns the keys over which a comprehension goes.
    fn key(self) -> Option<Self> {
        match self {
            Self::Domains { .. } => Some(Self::Domain),
            Self::Names { .. } => Some(Self::Name),
            _ => None,
        }
    }

    /// The most characters or entries that the API allows.
    fn size(self) -> Option<u64> {
        match self {
            Self::Device | Self::Capacity => None,
            Self::Shared => Some(1),
            Self::Driver | Self::Domain => Some(63),
            Self::Name | Self::Domains { .. } | Self::Names { .. } => Some(32),
            Self::Attribute => Some(64),
        }
    }
}

/// Knowledge of the value of an expression.
#[derive(Debug, Clone, Copy, Default)]
struct Value {
    place: Option<Place>,
    size: Option<u64>,
    /// Size of the keys and of the values, where it is a list or map of the expression itself.
    entry: Option<(u64, u64)>,
    /// Mark of a quantity or a version, which compare at the cost of one call.
    is_opaque: bool,
}

impl Value {
    /// A number or a truth value.
    const SCALAR: Self = Self::sized(1);

    /// A quantity or a version.
    const OPAQUE: Self = Self {
        place: None,
        size: None,
        entry: None,
        is_opaque: true,
    };

    const fn sized(size: u64) -> Self {
        Self {
            place: None,
            size: Some(size),
            entry: None,
            is_opaque: false,
        }
    }

    fn at(place: Option<Place>) -> Self {
        Self {
            place,
            size: place.and_then(Place::size),
            entry: None,
            is_opaque: place == Some(Place::Capacity),
        }
    }

    fn size(&self) -> u64 {
        self.size.unwrap_or(UNKNOWN)
    }

    /// The cost of one walk over a text of this size.
    fn walk(&self) -> u64 {
        tenth(self.size())
    }
}

/// A tenth, rounded up: the cost for each character of a text.
fn tenth(size: u64) -> u64 {
    size.div_ceil(10)
}

/// Estimates the worst cost of a parsed expression.
pub(super) fn estimate(expr: &IdedExpr) -> u64 {
    Coster::default().cost(expr).0
}

/// The variables in scope, the innermost last.
#[derive(Debug, Default)]
struct Coster {
    scope: Vec<(String, Value)>,
}

impl Coster {
    fn cost(&mut self, expr: &IdedExpr) -> (u64, Value) {
        match &expr.expr {
            Expr::Literal(literal) => (0, literal_value(literal)),
            Expr::Ident(name) => (1, self.variable(name)),
            Expr::Select(select) => {
                let (cost, operand) = self.cost(&select.operand);
                if select.test {
                    return (cost, Value::SCALAR);
                }
                let is_any = operand.place == Some(Place::Attribute);
                let place = operand
                    .place
                    .and_then(|place| place.value(Some(&select.field)));
                (cost.saturating_add(u64::from(!is_any)), Value::at(place))
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => {
                let (mut sum, mut item) = (CREATE_LIST, 0);
                for element in &list.elements {
                    let (cost, value) = self.cost(element);
                    sum = sum.saturating_add(cost);
                    item = item.max(value.size());
                }
                let value = Value {
                    entry: Some((1, item)),
                    ..Value::sized(list.elements.len() as u64)
                };
                (sum, value)
            }
            Expr::Map(map) => {
                let (mut sum, mut keys, mut values) = (CREATE_MAP, 0, 0);
                let entries = map
                    .entries
                    .iter()
                    .filter_map(|entry| super::prepare::entry_parts(&entry.expr));
                for (key, value) in entries {
                    let ((of_key, key), (of_value, value)) = (self.cost(key), self.cost(value));
                    sum = sum.saturating_add(of_key).saturating_add(of_value);
                    (keys, values) = (keys.max(key.size()), values.max(value.size()));
                }
                let value = Value {
                    entry: Some((keys, values)),
                    ..Value::sized(map.entries.len() as u64)
                };
                (sum, value)
            }
            Expr::Comprehension(of) => self.comprehension(of),
            Expr::Struct(_) => (CREATE_STRUCT, Value::default()),
            Expr::Unspecified => (0, Value::default()),
        }
    }

    fn variable(&self, name: &str) -> Value {
        let inner = self.scope.iter().rev().find(|(known, _)| known == name);
        match inner {
            Some((_, value)) => *value,
            None if name == "device" => Value::at(Some(Place::Device)),
            None => Value::default(),
        }
    }

    /// Estimates an expression with variables in scope.
    fn with(&mut self, variables: &[(&str, Value)], expr: &IdedExpr) -> (u64, Value) {
        let before = self.scope.len();
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), *value));
        self.scope.extend(variables);
        let found = self.cost(expr);
        self.scope.truncate(before);
        found
    }

    fn comprehension(&mut self, of: &ComprehensionExpr) -> (u64, Value) {
        let (init_cost, init) = self.cost(&of.accu_init);
        if let Expr::Call(call) = &of.accu_init.expr
            && ["@key", "@value"].contains(&call.func_name.as_str())
        {
            // One of the two variables of a comprehension, which cel-go has without a binding.
            return self.with(&[(&of.accu_var, init)], &of.result);
        }
        if of.accu_var == OPTIONAL {
            // `optional.orValue(other)`, which cel-go counts as one call.
            let other = match &of.result.expr {
                Expr::Call(choice) => choice.args.last(),
                _ => None,
            };
            let (other_cost, _) = other.map_or((0, Value::default()), |other| self.cost(other));
            let cost = init_cost.saturating_add(other_cost).saturating_add(1);
            return (cost, Value::default());
        }
        let (range_cost, range) = self.cost(&of.iter_range);
        if is_bind(of) {
            let (cost, value) = self.with(&[(&of.accu_var, init)], &of.result);
            let cost = cost.saturating_add(range_cost).saturating_add(init_cost);
            return (cost, value);
        }
        let is_map = range.place.is_some_and(|place| place.key().is_some());
        let item = match (range.place, range.entry) {
            (Some(place), _) if is_map => Value::at(place.key()),
            (_, Some((_, value))) => Value::sized(value),
            _ => Value::default(),
        };
        // The pair of two variables stands for the range: `@key` and `@value` take it apart.
        let item = if matches!(&of.iter_range.expr, Expr::Call(call) if call.func_name == "@pairs")
        {
            range
        } else {
            item
        };
        let variables = [(of.accu_var.as_str(), init), (of.iter_var.as_str(), item)];
        let (condition, _) = self.with(&variables, &of.loop_cond);
        let (step, stepped) = self.with(&variables, &of.loop_step);
        let (result, _) = self.with(&variables[..1], &of.result);
        let loops = range.size().saturating_mul(condition.saturating_add(step));
        let cost = [init_cost, range_cost, result]
            .into_iter()
            .fold(loops, u64::saturating_add);
        let is_list = matches!(&of.accu_init.expr, Expr::List(_) | Expr::Map(_));
        let value = Value {
            size: if is_list {
                Some(range.size())
            } else {
                init.size
            },
            entry: stepped.entry.filter(|_| is_list),
            ..Value::default()
        };
        (cost, value)
    }

    fn call(&mut self, call: &CallExpr) -> (u64, Value) {
        let (mut before, mut args) = (0_u64, Vec::new());
        let mut costs = Vec::new();
        for arg in &call.args {
            let (cost, value) = self.cost(arg);
            costs.push(cost);
            args.push(value);
            before = before.saturating_add(cost);
        }
        let target = call.target.as_ref().map(|target| {
            let (cost, value) = self.cost(target);
            before = before.saturating_add(cost);
            value
        });
        if call.func_name == operators::CONDITIONAL
            && let ([of, yes, no], [_, then, other]) = (costs.as_slice(), args.as_slice())
        {
            let entry = then.entry.zip(other.entry);
            let value = Value {
                size: Some(then.size().max(other.size())),
                entry: entry.map(|(a, b)| (a.0.max(b.0), a.1.max(b.1))),
                ..Value::default()
            };
            return (of.saturating_add(*yes.max(no)), value);
        }
        let (own, value) = of_function(&call.func_name, target, &args);
        (before.saturating_add(own), value)
    }
}

/// Returns what a function costs beside its arguments, and what is known of its result.
fn of_function(name: &str, target: Option<Value>, args: &[Value]) -> (u64, Value) {
    let first = args.first().copied().unwrap_or_default();
    let second = args.get(1).copied().unwrap_or_default();
    let text = target.unwrap_or(first);
    match name {
        operators::LOGICAL_AND | operators::LOGICAL_OR => (0, Value::SCALAR),
        "@pairs" => (0, first),
        "@key" => (0, side(first, true)),
        "@value" => (0, side(first, false)),
        operators::INDEX => {
            let place = first.place.and_then(|place| place.value(None));
            let size = first.entry.map(|(_, value)| value);
            let value = Value::at(place);
            (
                1,
                Value {
                    size: value.size.or(size),
                    ..value
                },
            )
        }
        operators::EQUALS | operators::NOT_EQUALS if first.is_opaque && second.is_opaque => {
            (1, Value::SCALAR)
        }
        // Such operands have no overload, which is the error that their author needs: it is found
        // by evaluation, and not as a cost without bound.
        operators::LESS
        | operators::LESS_EQUALS
        | operators::GREATER
        | operators::GREATER_EQUALS
            if first.is_opaque || second.is_opaque =>
        {
            (1, Value::SCALAR)
        }
        operators::EQUALS
        | operators::NOT_EQUALS
        | operators::LESS
        | operators::LESS_EQUALS
        | operators::GREATER
        | operators::GREATER_EQUALS => (tenth(first.size().min(second.size())), Value::SCALAR),
        operators::IN if second.place.is_some_and(|place| place.key().is_some()) => {
            (1, Value::SCALAR)
        }
        operators::IN => (second.size(), Value::SCALAR),
        operators::ADD => added(first, second),
        "startsWith" | "endsWith" | "isQuantity" | "isSemver" => (first.walk(), Value::SCALAR),
        "contains" => (text.walk().saturating_mul(first.walk()), Value::SCALAR),
        "matches" => {
            let pattern = if target.is_some() { first } else { second };
            (regex(text, pattern), Value::SCALAR)
        }
        "find" | "findAll" => (regex(text, first), Value::sized(text.size())),
        "lowerAscii" | "upperAscii" | "substring" | "trim" => {
            (text.walk(), Value::sized(text.size()))
        }
        "replace" => (
            tenth(text.size().saturating_mul(2)),
            replaced(text, first, second),
        ),
        "split" => (
            tenth(text.size().saturating_mul(2)),
            Value::sized(text.size()),
        ),
        "join" => joined(text, first),
        "isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf" | "includes" => {
            let cost = match text.entry {
                Some((_, item)) => text.size().saturating_mul(tenth(item).saturating_add(1)),
                None if name == "includes" => text.size(),
                None => text.walk(),
            };
            (cost, Value::SCALAR)
        }
        "quantity" | "semver" => (first.walk(), Value::OPAQUE),
        "add" | "sub" => (1, Value::OPAQUE),
        operators::NEGATE
        | operators::LOGICAL_NOT
        | operators::NOT_STRICTLY_FALSE
        | operators::SUBSTRACT
        | operators::MULTIPLY
        | operators::DIVIDE
        | operators::MODULO
        | "size"
        | "compareTo"
        | "sign"
        | "asInteger"
        | "asApproximateFloat"
        | "isInteger"
        | "isGreaterThan"
        | "isLessThan"
        | "major"
        | "minor"
        | "patch"
        | "int"
        | "uint"
        | "double"
        | "bool" => (1, Value::SCALAR),
        "dyn" => (1, first),
        _ => (1, Value::default()),
    }
}

/// Returns the keys or the values of the range of a comprehension with two variables.
fn side(range: Value, key: bool) -> Value {
    let by_place = range
        .place
        .and_then(|place| if key { place.key() } else { place.value(None) });
    match (by_place, range.entry) {
        (Some(place), _) => Value::at(Some(place)),
        (None, Some(entry)) => Value::sized(if key { entry.0 } else { entry.1 }),
        (None, None) => Value::default(),
    }
}

fn added(first: Value, second: Value) -> (u64, Value) {
    let size = first.size().saturating_add(second.size());
    if let (Some(a), Some(b)) = (first.entry, second.entry) {
        let entry = Some((a.0.max(b.0), a.1.max(b.1)));
        return (
            1,
            Value {
                entry,
                ..Value::sized(size)
            },
        );
    }
    // Numbers, or a list that grows.
    let is_scalar = first.size == Some(1) && second.size == Some(1);
    if is_scalar || first.entry.is_some() || second.entry.is_some() {
        return (
            1,
            Value {
                entry: first.entry.or(second.entry),
                ..Value::sized(size)
            },
        );
    }
    (tenth(size), Value::sized(size))
}

/// The cost of a regular expression: each of its states, a quarter of its letters, at each letter.
fn regex(text: Value, pattern: Value) -> u64 {
    let walk = tenth(text.size().saturating_add(1));
    walk.saturating_mul(pattern.size().div_ceil(4))
}

fn replaced(text: Value, from: Value, to: Value) -> Value {
    // The shortest text that can be replaced is unknown unless it is a literal.
    let size = match (from.size, to.size) {
        (Some(from), Some(to)) if from > 0 && to <= from => text.size(),
        (Some(from), Some(to)) if from > 0 => text.size().div_ceil(from).saturating_mul(to),
        _ => text
            .size()
            .saturating_add(1)
            .saturating_mul(to.size())
            .saturating_add(text.size()),
    };
    Value::sized(size)
}

fn joined(list: Value, separator: Value) -> (u64, Value) {
    let item = list.entry.map_or(UNKNOWN, |(_, item)| item);
    let between = separator
        .size
        .unwrap_or(0)
        .saturating_mul(list.size().saturating_sub(1));
    let size = list.size().saturating_mul(item).saturating_add(between);
    (tenth(size), Value::sized(size))
}

/// Says whether a comprehension is `cel.bind`.
fn is_bind(of: &ComprehensionExpr) -> bool {
    let over_nothing = matches!(&of.iter_range.expr, Expr::List(list) if list.elements.is_empty());
    let never =
        matches!(&of.loop_cond.expr, Expr::Literal(LiteralValue::Boolean(value)) if !value.inner());
    over_nothing && never
}

fn literal_value(literal: &LiteralValue) -> Value {
    match literal {
        LiteralValue::String(text) => Value::sized(text.inner().chars().count() as u64),
        LiteralValue::Bytes(bytes) => Value::sized(bytes.inner().len() as u64),
        _ => Value::SCALAR,
    }
}

#[cfg(test)]
mod tests;
