//! `cel.bind`, the two-variable comprehensions and what is lazy in cel-go, expanded while parsing.
//!
//! The interpreter ignores a comprehension's second variable, so `r.all(k, v, p)` becomes a
//! one-variable comprehension over the pairs of `r` with `k` and `v` bound inside.

use cel::common::ast::{
    CallExpr, ComprehensionExpr, Expr, IdedExpr, ListExpr, LiteralValue, operators,
};
use cel::parser::{Macro, MacroExprHelper, ParseError};
use cel::{DeclarationError, Env};

/// The variable that holds a pair; it cannot be written in an expression.
const PAIR: &str = "@pair_of_range";
/// The variable that holds an optional.
pub(super) const OPTIONAL: &str = "@optional";
/// The accumulator of the standard macros.
const RESULT: &str = "@result";

type Expansion = Result<Option<IdedExpr>, ParseError>;

/// Declares the macros.
pub(super) fn extension(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_macro(Macro::receiver("bind", 3, cel_bind))?;
    env.add_macro(Macro::receiver("or", 1, |helper, target, args| {
        Ok(default(helper, target, args, false))
    }))?;
    env.add_macro(Macro::receiver("orValue", 1, |helper, target, args| {
        Ok(default(helper, target, args, true))
    }))?;
    env.add_macro(Macro::receiver("reverse", 0, |helper, target, _| {
        Ok(target
            .take()
            .map(|list| call(helper, "@reverse", vec![list])))
    }))?;
    for name in ["all", "exists", "existsOne", "exists_one"] {
        env.add_macro(Macro::receiver(name, 3, move |helper, target, args| {
            predicate(helper, target, args, name)
        }))?;
    }
    for name in ["transformList", "transformMap", "transformMapEntry"] {
        for arguments in [3, 4] {
            env.add_macro(Macro::receiver(
                name,
                arguments,
                move |helper, target, args| transform(helper, target, args, name),
            ))?;
        }
    }
    Ok(())
}

fn call(helper: &mut MacroExprHelper<'_>, name: &str, args: Vec<IdedExpr>) -> IdedExpr {
    helper.next_expr(Expr::Call(CallExpr {
        func_name: name.to_owned(),
        target: None,
        args,
    }))
}

fn ident(helper: &mut MacroExprHelper<'_>, name: &str) -> IdedExpr {
    helper.next_expr(Expr::Ident(name.to_owned()))
}

fn boolean(helper: &mut MacroExprHelper<'_>, value: bool) -> IdedExpr {
    helper.next_expr(Expr::Literal(LiteralValue::Boolean(value.into())))
}

fn integer(helper: &mut MacroExprHelper<'_>, value: i64) -> IdedExpr {
    helper.next_expr(Expr::Literal(LiteralValue::Int(value.into())))
}

fn list(helper: &mut MacroExprHelper<'_>, elements: Vec<IdedExpr>) -> IdedExpr {
    helper.next_expr(Expr::List(ListExpr::new(elements)))
}

/// `body` with `name` bound to `init`: a comprehension over nothing whose accumulator is the
/// variable.
fn bind(
    helper: &mut MacroExprHelper<'_>,
    name: String,
    init: IdedExpr,
    body: IdedExpr,
) -> IdedExpr {
    let comprehension = ComprehensionExpr {
        iter_range: list(helper, Vec::new()),
        iter_var: "#unused".to_owned(),
        iter_var2: None,
        accu_init: init,
        loop_cond: boolean(helper, false),
        loop_step: ident(helper, &name),
        accu_var: name,
        result: body,
    };
    helper.next_expr(Expr::Comprehension(Box::new(comprehension)))
}

fn name_of(helper: &MacroExprHelper<'_>, expr: IdedExpr) -> Result<String, ParseError> {
    match expr.expr {
        Expr::Ident(name) => Ok(name),
        _ => Err(helper.new_error(expr.id, "argument must be a simple name")),
    }
}

fn cel_bind(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
) -> Expansion {
    // `x.bind(…)` on anything but the namespace is an ordinary call.
    if !matches!(target.as_ref().map(|t| &t.expr), Some(Expr::Ident(name)) if name == "cel") {
        return Ok(None);
    }
    let (Some(body), Some(init), Some(name)) = (args.pop(), args.pop(), args.pop()) else {
        return Ok(None);
    };
    let Expr::Ident(variable) = name.expr else {
        return Err(helper.new_error(
            name.id,
            "cel.bind() variable names must be simple identifiers",
        ));
    };
    *target = None;
    Ok(Some(bind(helper, variable, init, body)))
}

/// `optional.or(other)` and `optional.orValue(other)`: `other` is only evaluated where the optional
/// is empty.
fn default(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
    value: bool,
) -> Option<IdedExpr> {
    let (target, other) = (target.take()?, args.pop()?);
    let mut method = |name: &str| {
        let optional = Box::new(ident(helper, OPTIONAL));
        let call = CallExpr {
            func_name: name.to_owned(),
            target: Some(optional),
            args: Vec::new(),
        };
        helper.next_expr(Expr::Call(call))
    };
    let has = method("hasValue");
    let own = if value {
        method("value")
    } else {
        ident(helper, OPTIONAL)
    };
    let body = call(helper, operators::CONDITIONAL, vec![has, own, other]);
    Some(bind(helper, OPTIONAL.to_owned(), target, body))
}

/// The two variables and what follows them; `body` of the loop sees them.
struct Loop {
    range: IdedExpr,
    key: String,
    value: String,
}

impl Loop {
    fn new(
        helper: &mut MacroExprHelper<'_>,
        range: IdedExpr,
        names: [IdedExpr; 2],
    ) -> Result<Self, ParseError> {
        let [key, value] = names;
        let value_id = value.id;
        let (key, value) = (name_of(helper, key)?, name_of(helper, value)?);
        if key == value {
            return Err(helper.new_error(value_id, format!("duplicate variable name: {key}")));
        }
        Ok(Self {
            range: call(helper, "@pairs", vec![range]),
            key,
            value,
        })
    }

    /// `body` with both variables bound to the current pair.
    fn scoped(&self, helper: &mut MacroExprHelper<'_>, body: IdedExpr) -> IdedExpr {
        let pair = ident(helper, PAIR);
        let value = call(helper, "@value", vec![pair]);
        let inner = bind(helper, self.value.clone(), value, body);
        let pair = ident(helper, PAIR);
        let key = call(helper, "@key", vec![pair]);
        bind(helper, self.key.clone(), key, inner)
    }

    fn fold(
        self,
        helper: &mut MacroExprHelper<'_>,
        init: IdedExpr,
        condition: IdedExpr,
        step: IdedExpr,
        result: IdedExpr,
    ) -> IdedExpr {
        helper.next_expr(Expr::Comprehension(Box::new(ComprehensionExpr {
            iter_range: self.range,
            iter_var: PAIR.to_owned(),
            iter_var2: None,
            accu_var: RESULT.to_owned(),
            accu_init: init,
            loop_cond: condition,
            loop_step: step,
            result,
        })))
    }
}

fn predicate(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
    name: &str,
) -> Expansion {
    let (Some(body), Some(value), Some(key)) = (args.pop(), args.pop(), args.pop()) else {
        return Ok(None);
    };
    let Some(range) = target.take() else {
        return Ok(None);
    };
    let pairs = Loop::new(helper, range, [key, value])?;
    let body = pairs.scoped(helper, body);
    let accumulator = ident(helper, RESULT);
    let result = ident(helper, RESULT);
    Ok(Some(match name {
        "all" => {
            let (init, seen) = (boolean(helper, true), ident(helper, RESULT));
            let condition = call(helper, operators::NOT_STRICTLY_FALSE, vec![seen]);
            let step = call(helper, operators::LOGICAL_AND, vec![accumulator, body]);
            pairs.fold(helper, init, condition, step, result)
        }
        "exists" => {
            let (init, seen) = (boolean(helper, false), ident(helper, RESULT));
            let not = call(helper, operators::LOGICAL_NOT, vec![seen]);
            let condition = call(helper, operators::NOT_STRICTLY_FALSE, vec![not]);
            let step = call(helper, operators::LOGICAL_OR, vec![accumulator, body]);
            pairs.fold(helper, init, condition, step, result)
        }
        _ => {
            let (init, condition) = (integer(helper, 0), boolean(helper, true));
            let one = integer(helper, 1);
            let more = call(helper, operators::ADD, vec![accumulator, one]);
            let same = ident(helper, RESULT);
            let step = call(helper, operators::CONDITIONAL, vec![body, more, same]);
            let one = integer(helper, 1);
            let result = call(helper, operators::EQUALS, vec![result, one]);
            pairs.fold(helper, init, condition, step, result)
        }
    }))
}

fn transform(
    helper: &mut MacroExprHelper<'_>,
    target: &mut Option<IdedExpr>,
    args: &mut Vec<IdedExpr>,
    name: &str,
) -> Expansion {
    let Some(body) = args.pop() else {
        return Ok(None);
    };
    let filter = if args.len() == 3 { args.pop() } else { None };
    let (Some(value), Some(key), Some(range)) = (args.pop(), args.pop(), target.take()) else {
        return Ok(None);
    };
    let pairs = Loop::new(helper, range, [key, value])?;
    let body = if name == "transformMap" {
        let key = ident(helper, &pairs.key);
        call(helper, "@pair", vec![key, body])
    } else {
        body
    };
    let item = pairs.scoped(helper, body);
    let item = list(helper, vec![item]);
    let accumulator = ident(helper, RESULT);
    let step = call(helper, operators::ADD, vec![accumulator, item]);
    let step = match filter {
        Some(filter) => {
            let filter = pairs.scoped(helper, filter);
            let same = ident(helper, RESULT);
            call(helper, operators::CONDITIONAL, vec![filter, step, same])
        }
        None => step,
    };
    let (init, condition, result) = (
        list(helper, Vec::new()),
        boolean(helper, true),
        ident(helper, RESULT),
    );
    let all = pairs.fold(helper, init, condition, step, result);
    Ok(Some(match name {
        "transformMap" => call(helper, "@toMap", vec![all]),
        "transformMapEntry" => call(helper, "@merge", vec![all]),
        _ => all,
    }))
}
