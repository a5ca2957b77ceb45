//! Device selectors: the CEL environment of `resource.k8s.io/v1`.
//!
//! The only variable is `device` (`driver`, `attributes`, `capacity`, `allowMultipleAllocations`).
//! An unknown domain is an empty map, an unknown id is the error `no such key`. On top of the
//! standard library: optional types, `cel.bind`, two-variable comprehensions, strings, lists, sets
//! and regex functions, `quantity` and `semver`. Functions that are missing are refused by name
//! ([`CelError::Offline`]); what differs is listed in `docs/contributing/allocator.md`.

mod collections;
mod cost;
mod device;
mod equality;
#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the declaration macros pass arguments by reference"
)]
mod library;
mod macros;
mod prepare;
mod regexes;
mod types;

use std::sync::{Arc, LazyLock};

use ::cel::common::types::CelBool;
use ::cel::{Context, Env, ExecutionError, IdedExpr, Value};
use k8s_openapi::api::resource::v1::Device;
use thiserror::Error;

use self::device::DeviceView;

/// The longest expression that Kubernetes accepts, in bytes.
pub(crate) const MAX_EXPRESSION_LENGTH: usize = 10 * 1024;

/// Fault of an expression, in Kubernetes' words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CelError {
    /// The expression is longer than the API allows.
    #[error(
        "Too long: may not be more than {MAX_EXPRESSION_LENGTH} bytes, this expression has {length}"
    )]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// The expression costs more than the API server takes, as it estimates it.
    #[error(
        "too complex, exceeds cost limit ({cost} is estimated, {} is allowed)",
        cost::LIMIT
    )]
    TooCostly {
        /// The estimate.
        cost: u64,
    },
    /// The expression does not compile: a mistake in the class or claim.
    #[error("compilation failed: {0}")]
    Compile(String),
    /// The expression may be right, and this evaluator cannot say what it gives.
    #[error("unknown: divvy cannot evaluate this selector offline because {0}")]
    Offline(String),
    /// The evaluation failed for one device. To Kubernetes this is fatal for the whole pod.
    #[error("{0}")]
    Runtime(String),
}

/// A compiled selector.
#[derive(Debug)]
pub(crate) struct Program {
    expression: IdedExpr,
}

/// The environment, built once: it is the same for every selector.
static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| {
    #[expect(
        clippy::expect_used,
        reason = "the declarations are constants; any test that compiles shows it"
    )]
    let env = environment().expect("the CEL declarations do not conflict");
    Arc::new(env)
});

fn environment() -> Result<Env, ::cel::DeclarationError> {
    let mut env = Env::stdlib();
    env.add_extension(::cel::extensions::strings)?;
    env.add_extension(::cel::extensions::lists)?;
    env.add_extension(library::extension)?;
    env.add_extension(equality::extension)?;
    env.add_extension(macros::extension)?;
    Ok(env)
}

/// Compiles a device selector.
pub(crate) fn compile(expression: &str) -> Result<Program, CelError> {
    if expression.len() > MAX_EXPRESSION_LENGTH {
        return Err(CelError::TooLong {
            length: expression.len(),
        });
    }
    prepare::check_depth(expression)?;
    let program = ENV
        .compile(expression)
        .map_err(|errors| CelError::Compile(errors.to_string()))?;
    let mut expression = program.expression().clone();
    prepare::prepare(&mut expression)?;
    Ok(Program { expression })
}

/// Checks what the API server checks of a selector: its length, that it compiles, and its cost.
pub(crate) fn check(expression: &str) -> Result<(), CelError> {
    compile(expression)?;
    // An expression that compiled once is parsed without errors.
    let parsed = ENV
        .compile(expression)
        .map_err(|errors| CelError::Compile(errors.to_string()))?;
    match cost::estimate(parsed.expression()) {
        cost if cost > cost::LIMIT => Err(CelError::TooCostly { cost }),
        _ => Ok(()),
    }
}

/// Says whether a device of `driver` satisfies the selector. `shares` is whether the scheduler
/// knows
/// devices that several claims can have.
pub(crate) fn eval(
    program: &Program,
    driver: &str,
    device: &Device,
    shares: bool,
) -> Result<bool, CelError> {
    // Kubernetes converts all attributes, also those that are not read.
    if let Some((name, _)) = device
        .attributes
        .iter()
        .flatten()
        .find(|(_, value)| device::is_empty(value))
    {
        return Err(CelError::Runtime(format!(
            "attribute {name}: unsupported attribute value"
        )));
    }
    let mut context = Context::with_env(Arc::clone(&ENV));
    context.add_variable_as_val("device", Box::new(DeviceView::new(driver, device, shares)));
    let result = Value::resolve_val(&program.expression, &context)
        .map_err(|error| CelError::Runtime(in_kubernetes_words(&error)))?;
    result
        .downcast_ref::<CelBool>()
        .map(|b| *b.inner())
        .ok_or_else(|| {
            let got = result.get_type().name();
            CelError::Runtime(format!(
                "CEL result of type {got} could not be converted to bool"
            ))
        })
}

/// The wording of cel-go for the errors that users meet; the rest keeps the interpreter's own.
fn in_kubernetes_words(error: &ExecutionError) -> String {
    match error {
        ExecutionError::NoSuchKey(key) => format!("no such key: {key}"),
        ExecutionError::NoSuchOverload(call) => {
            format!(
                "no such overload: {}({})",
                call.function(),
                call.argument_types().join(", ")
            )
        }
        ExecutionError::UnexpectedType { want, .. } if want == "bool" => {
            "no such overload".to_owned()
        }
        ExecutionError::UndeclaredReference(name) => format!("undeclared reference to '{name}'"),
        ExecutionError::FunctionError { message, .. } => message.clone(),
        ExecutionError::DivisionByZero(_) => "division by zero".to_owned(),
        ExecutionError::RemainderByZero(_) => "modulus by zero".to_owned(),
        ExecutionError::Overflow(..) => "integer overflow".to_owned(),
        ExecutionError::IndexOutOfBounds(_) => "index out of bounds".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
