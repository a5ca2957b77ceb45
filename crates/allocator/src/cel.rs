//! Device selectors: the CEL environment of `resource.k8s.io/v1`.
//!
//! The only variable is `device` (`driver`, `attributes`, `capacity`, `allowMultipleAllocations`). An unknown
//! domain is an empty map, an unknown id is the error `no such key`. On top of the standard library: optional
//! types, `cel.bind`, two-variable comprehensions, strings, lists, sets and regex functions, `quantity` and
//! `semver`. Not here, and refused by name when compiling: URL, IP, CIDR, `format.*` and the authorizer, which
//! no device selector has a use for; the cost limit is not enforced either.
//!
//! [`compile`] finds syntax errors and, as the API server does, undeclared names, calls that no overload can
//! match and results that are not bool; [`eval`] gives the errors of one device.

mod check;
mod collections;
mod device;
mod equality;
mod guard;
mod known;
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the declaration macros pass arguments by reference")]
mod library;
mod macros;
mod reads;
mod regexes;
mod types;

use std::sync::{Arc, LazyLock};

use ::cel::common::types::CelBool;
use ::cel::{Context, Env, ExecutionError, IdedExpr, Value};
use k8s_openapi::api::resource::v1::Device;
use thiserror::Error;

use self::device::DeviceView;
use self::guard::Depth;
use self::known::Known;

/// The longest expression that Kubernetes accepts, in bytes.
pub const MAX_EXPRESSION_LENGTH: usize = 10 * 1024;

/// What is wrong with an expression, in Kubernetes' words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CelError {
    /// The expression is longer than the API allows; nobody would have stored it.
    #[error("Too long: may not be more than {MAX_EXPRESSION_LENGTH} bytes, this expression has {length}")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// The expression does not compile: a mistake in the class or claim.
    #[error("compilation failed: {0}")]
    Compile(String),
    /// The expression compiles to something that can never be a yes or no.
    #[error("must evaluate to bool or the unknown type, not {0}")]
    ResultType(String),
    /// The evaluation failed for one device. To Kubernetes this is fatal for the whole pod.
    #[error("{0}")]
    Runtime(String),
}

/// A compiled selector.
#[derive(Debug)]
pub struct Program {
    source: String,
    expression: IdedExpr,
    depth: Depth,
    /// Its answers, where what it reads of a device is known.
    known: Option<Known>,
}

impl Program {
    /// The expression it was compiled from.
    pub fn source(&self) -> &str {
        &self.source
    }
}

/// The environment, built once: it is the same for every selector.
static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| {
    #[expect(clippy::expect_used, reason = "the declarations are constants; any test that compiles shows it")]
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
pub fn compile(expression: &str) -> Result<Program, CelError> {
    if expression.len() > MAX_EXPRESSION_LENGTH {
        return Err(CelError::TooLong { length: expression.len() });
    }
    let depth = guard::depth(expression);
    let parsed = match depth {
        Depth::Shallow => Some(parse(expression)),
        Depth::Deep => guard::with_deep_stack(|| parse(expression)),
        Depth::TooDeep => None,
    };
    let parsed = parsed.unwrap_or_else(|| {
        let limit = guard::MAX_DEPTH;
        let text = format!("ERROR: <input>:-1:0: expression recursion limit exceeded: {limit}");
        Err(CelError::Compile(text))
    })?;
    // A deep expression is rare, and walking over it needs a deep stack too.
    let reads = if depth == Depth::Shallow { reads::of(&parsed) } else { None };
    let known = reads.map(Known::new);
    Ok(Program { source: expression.to_owned(), expression: parsed, depth, known })
}

/// Parses and checks.
fn parse(expression: &str) -> Result<IdedExpr, CelError> {
    let program = ENV.compile(expression).map_err(|errors| CelError::Compile(errors.to_string()))?;
    let untyped = check::check(&program)?;
    let mut parsed = program.expression().clone();
    equality::make_strict(&mut parsed, &untyped);
    Ok(parsed)
}

/// Whether a device of `driver` satisfies the selector.
///
/// Evaluated once for all devices that agree in what the selector reads.
pub fn eval(program: &Program, driver: &str, device: &Device) -> Result<bool, CelError> {
    match &program.known {
        Some(known) => known.or_else(driver, device, || eval_now(program, driver, device)),
        None => eval_now(program, driver, device),
    }
}

fn eval_now(program: &Program, driver: &str, device: &Device) -> Result<bool, CelError> {
    if program.depth == Depth::Shallow {
        return evaluate(program, driver, device);
    }
    let no_thread = || Err(CelError::Runtime("no thread for a deeply nested expression".to_owned()));
    guard::with_deep_stack(|| evaluate(program, driver, device)).unwrap_or_else(no_thread)
}

fn evaluate(program: &Program, driver: &str, device: &Device) -> Result<bool, CelError> {
    let mut context = Context::with_env(Arc::clone(&ENV));
    context.add_variable_as_val("device", Box::new(DeviceView::new(driver, device)));
    let result = Value::resolve_val(&program.expression, &context)
        .map_err(|error| CelError::Runtime(in_kubernetes_words(&error)))?;
    result.downcast_ref::<CelBool>().map(|b| *b.inner()).ok_or_else(|| {
        let got = result.get_type().name();
        CelError::Runtime(format!("CEL result of type {got} could not be converted to bool"))
    })
}

/// The wording of cel-go for the errors that users meet; the rest keeps the interpreter's own.
fn in_kubernetes_words(error: &ExecutionError) -> String {
    match error {
        ExecutionError::NoSuchKey(key) => format!("no such key: {key}"),
        ExecutionError::NoSuchOverload(call) => {
            format!("no such overload: {}({})", call.function(), call.argument_types().join(", "))
        }
        ExecutionError::UnexpectedType { want, .. } if want == "bool" => "no such overload".to_owned(),
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
