//! A type check of a parsed expression, as far as types are certain.
//!
//! The API server type-checks selectors before it stores them; the interpreter does not. This check finds what
//! it would refuse: undeclared names, calls without a matching overload, fields that do not exist, a result that
//! is not bool. Where a type is not certain it stays silent, so that it never refuses what Kubernetes accepts.

mod signatures;
mod ty;

use std::collections::BTreeSet;

use cel::Program;
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SelectExpr, operators,
};

use self::ty::Ty;
use super::{CelError, regexes};

/// Checks a parsed selector; gives the comparisons (`==`, `!=`) whose left side can be of any type.
pub(super) fn check(program: &Program) -> Result<BTreeSet<u64>, CelError> {
    let mut checker = Checker { program, scope: Vec::new(), problems: Vec::new(), untyped: BTreeSet::new() };
    let result = checker.infer(program.expression());
    if !checker.problems.is_empty() {
        return Err(CelError::Compile(checker.problems.join("\n")));
    }
    if result.unknown() || result == Ty::Bool {
        Ok(checker.untyped)
    } else {
        Err(CelError::ResultType(result.to_string()))
    }
}

struct Checker<'p> {
    program: &'p Program,
    /// Variables of enclosing comprehensions and binds, innermost last.
    scope: Vec<(String, Ty)>,
    problems: Vec<String>,
    untyped: BTreeSet<u64>,
}

impl Checker<'_> {
    /// Notes a problem in cel-go's form: position, text, the line and a mark below it.
    fn problem(&mut self, at: u64, message: &str) -> Ty {
        let info = self.program.source_info();
        let offset = info.offset_for(at).map_or(0, |(start, _)| usize::try_from(start).unwrap_or(0));
        let before: String = info.source.chars().take(offset).collect();
        let line = before.matches('\n').count();
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count();
        let snippet = info.source.lines().nth(line).unwrap_or_default();
        let mark = ".".repeat(column);
        let text = format!("ERROR: <input>:{}:{}: {message}\n | {snippet}\n | {mark}^", line + 1, column + 1);
        if !self.problems.contains(&text) {
            self.problems.push(text);
        }
        Ty::Dyn
    }

    fn no_overload(&mut self, at: u64, function: &str, target: Option<&Ty>, args: &[Ty]) -> Ty {
        let args = args.iter().map(Ty::to_string).collect::<Vec<_>>().join(", ");
        let applied = match target {
            Some(target) => format!("{target}.({args})"),
            None => format!("({args})"),
        };
        self.problem(at, &format!("found no matching overload for '{function}' applied to '{applied}'"))
    }

    fn undeclared(&mut self, at: u64, name: &str) -> Ty {
        let hint = if signatures::KNOWN_ELSEWHERE.contains(&name) {
            ": Kubernetes has it, this evaluator does not support it yet"
        } else {
            ""
        };
        self.problem(at, &format!("undeclared reference to '{name}' (in container ''){hint}"))
    }

    fn infer(&mut self, expr: &IdedExpr) -> Ty {
        match &expr.expr {
            Expr::Literal(literal) => match literal {
                LiteralValue::Boolean(_) => Ty::Bool,
                LiteralValue::Bytes(_) => Ty::Bytes,
                LiteralValue::Double(_) => Ty::Double,
                LiteralValue::Int(_) => Ty::Int,
                LiteralValue::Null => Ty::Null,
                LiteralValue::String(_) => Ty::String,
                LiteralValue::UInt(_) => Ty::Uint,
            },
            Expr::Ident(name) => self.variable(expr.id, name),
            Expr::Select(select) => self.select(expr.id, select),
            Expr::Call(call) => self.call(expr.id, call),
            Expr::List(list) => {
                let mut element: Option<Ty> = None;
                for (index, item) in list.elements.iter().enumerate() {
                    let mut ty = self.infer(item);
                    if list.optional_indices.contains(&index) {
                        ty = if let Ty::Optional(inner) = ty { *inner } else { Ty::Dyn };
                    }
                    if let Some(first) = element.as_ref().filter(|first| !first.fits(&ty)) {
                        let text = format!("expected type '{first}' but found '{ty}'");
                        self.problem(item.id, &text);
                    }
                    element = Some(element.map_or(ty.clone(), |first| first.join(&ty)));
                }
                Ty::list(element.unwrap_or(Ty::Dyn))
            }
            Expr::Map(map) => {
                for entry in &map.entries {
                    if let EntryExpr::MapEntry(entry) = &entry.expr {
                        self.infer(&entry.key);
                        self.infer(&entry.value);
                    }
                }
                Ty::map(Ty::Dyn, Ty::Dyn)
            }
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
            Expr::Struct(literal) => self.undeclared(expr.id, &literal.type_name),
            Expr::Unspecified => Ty::Dyn,
        }
    }

    fn variable(&mut self, at: u64, name: &str) -> Ty {
        let name = name.strip_prefix('.').unwrap_or(name);
        if let Some((_, ty)) = self.scope.iter().rev().find(|(n, _)| n == name) {
            return ty.clone();
        }
        match name {
            "device" => Ty::Device,
            _ if signatures::TYPES.contains(&name) => Ty::Type,
            _ => self.undeclared(at, name),
        }
    }

    fn select(&mut self, at: u64, select: &SelectExpr) -> Ty {
        let operand = self.infer(&select.operand);
        let selected = self.field(at, &operand, &select.field);
        if select.test { Ty::Bool } else { selected }
    }

    fn field(&mut self, at: u64, operand: &Ty, field: &str) -> Ty {
        let domains = |value| Ty::map(Ty::String, Ty::map(Ty::String, value));
        match operand {
            Ty::Device => match field {
                "driver" => Ty::String,
                "attributes" => domains(Ty::Any),
                "capacity" => domains(Ty::Quantity),
                "allowMultipleAllocations" => Ty::Bool,
                _ => self.problem(at, &format!("undefined field '{field}'")),
            },
            Ty::Map(_, value) => (**value).clone(),
            Ty::Optional(inner) => Ty::optional(self.field(at, inner, field)),
            ty if ty.unknown() => Ty::Dyn,
            other => self.problem(at, &format!("type '{other}' does not support field selection")),
        }
    }

    fn comprehension(&mut self, c: &ComprehensionExpr) -> Ty {
        let element = match self.infer(&c.iter_range) {
            Ty::List(element) => *element,
            Ty::Map(key, _) => *key,
            ty if ty.unknown() => Ty::Dyn,
            other => self.problem(
                c.iter_range.id,
                &format!(
                    "expression of type '{other}' cannot be range of a comprehension (must be list, map, or dynamic)"
                ),
            ),
        };
        let accumulated = self.infer(&c.accu_init);
        let outer = self.scope.len();
        self.scope.push((c.accu_var.clone(), accumulated.clone()));
        let inner = self.scope.len();
        self.scope.push((c.iter_var.clone(), element));
        self.infer(&c.loop_cond);
        let step = self.infer(&c.loop_step);
        self.scope.truncate(inner);
        // A list that starts empty takes its type from what is appended.
        if accumulated == Ty::list(Ty::Dyn)
            && let Some(accumulator) = self.scope.last_mut()
        {
            accumulator.1 = step;
        }
        let result = self.infer(&c.result);
        self.scope.truncate(outer);
        result
    }

    fn call(&mut self, at: u64, call: &CallExpr) -> Ty {
        let name = call.func_name.as_str();
        if let ("matches" | "find" | "findAll", Some(pattern)) = (name, call.args.last())
            && let Expr::Literal(LiteralValue::String(text)) = &pattern.expr
            && regexes::compiled(text.inner()).is_err()
        {
            self.problem(pattern.id, &format!("invalid {name} argument"));
        }
        if let Some(target) = &call.target {
            return self.method(at, name, target, &call.args);
        }
        let args = self.all(&call.args);
        self.operator(at, name, &args)
    }

    /// A call with a target: a function of a namespace, or a method of a value.
    fn method(&mut self, at: u64, name: &str, target: &IdedExpr, args: &[IdedExpr]) -> Ty {
        // `optional.of(x)`: the target is a namespace, unless a variable has its name.
        if let Expr::Ident(namespace) = &target.expr
            && !self.scope.iter().any(|(n, _)| n == namespace)
            && namespace != "device"
        {
            let qualified = format!("{namespace}.{name}");
            let args = self.all(args);
            return if signatures::declared(&qualified, false) {
                self.overload(at, &qualified, None, &args)
            } else if signatures::TYPES.contains(&namespace.as_str()) {
                self.no_overload(at, name, Some(&Ty::Type), &args)
            } else {
                self.undeclared(target.id, namespace)
            };
        }
        let target = self.infer(target);
        let args = self.all(args);
        if signatures::declared(name, true) {
            self.overload(at, name, Some(&target), &args)
        } else {
            self.undeclared(at, name)
        }
    }

    /// A call without a target: an operator, or a function.
    fn operator(&mut self, at: u64, name: &str, args: &[Ty]) -> Ty {
        match (name, args) {
            (operators::CONDITIONAL, [condition, yes, no]) => {
                if !condition.fits(&Ty::Bool) || !yes.fits(no) {
                    return self.no_overload(at, name, None, args);
                }
                yes.clone().join(no)
            }
            (operators::LOGICAL_AND | operators::LOGICAL_OR, [a, b]) => {
                self.bool_if(a.fits(&Ty::Bool) && b.fits(&Ty::Bool), at, name, args)
            }
            (operators::LOGICAL_NOT, [a]) => self.bool_if(a.fits(&Ty::Bool), at, name, args),
            (operators::NOT_STRICTLY_FALSE, _) => Ty::Bool,
            (operators::EQUALS | operators::NOT_EQUALS, [a, b]) => {
                if a.unknown() {
                    self.untyped.insert(at);
                }
                self.bool_if(is_equatable(a, b), at, name, args)
            }
            (
                operators::LESS | operators::LESS_EQUALS | operators::GREATER | operators::GREATER_EQUALS,
                [a, b],
            ) => self.bool_if(is_ordered(a, b), at, name, args),
            (operators::IN, [item, range]) => match range {
                Ty::List(element) if element.fits(item) => Ty::Bool,
                Ty::Map(key, _) if key.fits(item) => Ty::Bool,
                ty if ty.unknown() => Ty::Bool,
                _ => self.no_overload(at, name, None, args),
            },
            (operators::INDEX, [of, key]) => self.index(at, name, of, key, args),
            (operators::OPT_INDEX | operators::OPT_SELECT, [of, key]) => {
                let inner = if let Ty::Optional(inner) = of { (**inner).clone() } else { of.clone() };
                let value = if name == operators::OPT_SELECT && inner == Ty::Device {
                    Ty::Dyn
                } else {
                    self.index(at, name, &inner, key, args)
                };
                Ty::optional(value)
            }
            (operators::NEGATE, [a]) => match a {
                Ty::Int | Ty::Double => a.clone(),
                ty if ty.unknown() => Ty::Dyn,
                _ => self.no_overload(at, name, None, args),
            },
            (operators::ADD, [a, b]) => match (a, b) {
                (Ty::List(x), Ty::List(y)) => Ty::list(match (&**x, &**y) {
                    (Ty::Dyn, other) | (other, Ty::Dyn) => other.clone(),
                    (x, y) => x.clone().join(y),
                }),
                _ => self.arithmetic(at, name, a, b, &[Ty::String, Ty::Bytes]),
            },
            (operators::SUBSTRACT | operators::MULTIPLY | operators::DIVIDE | operators::MODULO, [a, b]) => {
                self.arithmetic(at, name, a, b, &[])
            }
            _ if name.starts_with('@') => Self::helper(name, args),
            _ if signatures::declared(name, false) => self.overload(at, name, None, args),
            _ => self.undeclared(at, name),
        }
    }

    fn bool_if(&mut self, fits: bool, at: u64, name: &str, args: &[Ty]) -> Ty {
        if fits { Ty::Bool } else { self.no_overload(at, name, None, args) }
    }

    fn all(&mut self, args: &[IdedExpr]) -> Vec<Ty> {
        args.iter().map(|arg| self.infer(arg)).collect()
    }

    fn index(&mut self, at: u64, name: &str, of: &Ty, key: &Ty, args: &[Ty]) -> Ty {
        match of {
            Ty::List(element) if key.fits(&Ty::Int) || key.is_number() => (**element).clone(),
            Ty::Map(expected, value) if expected.fits(key) => (**value).clone(),
            Ty::Optional(inner) => Ty::optional(self.index(at, name, inner, key, args)),
            ty if ty.unknown() => Ty::Dyn,
            _ => self.no_overload(at, name, None, args),
        }
    }

    fn arithmetic(&mut self, at: u64, name: &str, a: &Ty, b: &Ty, also: &[Ty]) -> Ty {
        let allowed = |t: &Ty| t.unknown() || t.is_number() || also.contains(t);
        if !(allowed(a) && allowed(b) && a.fits(b)) {
            return self.no_overload(at, name, None, &[a.clone(), b.clone()]);
        }
        if a.unknown() { b.clone() } else { a.clone() }
    }

    /// What the functions behind the comprehension macros give.
    fn helper(name: &str, args: &[Ty]) -> Ty {
        match name {
            "@pairs" | "@pair" => Ty::list(Ty::Dyn),
            "@toMap" | "@merge" => Ty::map(Ty::Dyn, Ty::Dyn),
            "@sortByAssociatedKeys" => args.first().cloned().unwrap_or(Ty::Dyn),
            _ => Ty::Dyn,
        }
    }

    fn overload(&mut self, at: u64, name: &str, target: Option<&Ty>, args: &[Ty]) -> Ty {
        let matching: Vec<Ty> = signatures::matching(name, target, args).collect();
        let mut results = matching.into_iter();
        match results.next() {
            Some(first) => results.fold(first, |all, one| all.join(&one)),
            None => self.no_overload(at, name, target, args),
        }
    }
}

/// Whether `==` is defined for two types.
fn is_equatable(a: &Ty, b: &Ty) -> bool {
    a.fits(b) || (a.is_number() && b.is_number()) || *a == Ty::Null || *b == Ty::Null
}

/// Whether `<` is defined for two types.
fn is_ordered(a: &Ty, b: &Ty) -> bool {
    let ordered = |t: &Ty| t.unknown() || t.is_number() || matches!(t, Ty::String | Ty::Bytes | Ty::Bool);
    ordered(a) && ordered(b) && (a.fits(b) || (a.is_number() && b.is_number()))
}
