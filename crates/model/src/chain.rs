//! Errors with their causes on one line.

use std::error::Error;
use std::fmt;

/// Displays an error and all its causes: `outer: cause: cause`. For logs, gRPC answers and Events;
/// the error types themselves print only their own layer.
#[derive(Clone, Copy)]
pub struct Chain<'a>(pub &'a dyn Error);

/// Returns an error with all its causes, on one line.
pub fn chain(error: &dyn Error) -> String {
    Chain(error).to_string()
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = self.0.to_string();
        f.write_str(&last)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // Foreign errors often print their cause themselves, or pass it through unchanged.
            if !last.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
            cause = error.source();
        }
        Ok(())
    }
}

impl fmt::Debug for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write the record of claim ns/c")]
    struct Outer(#[source] Middle);

    #[derive(Debug, thiserror::Error)]
    #[error("disk /var: {0}")]
    struct Middle(#[source] io::Error);

    #[test]
    fn causes_follow_and_are_not_said_twice() {
        let error = Outer(Middle(io::Error::other("no space left")));
        assert_eq!(
            Chain(&error).to_string(),
            "cannot write the record of claim ns/c: disk /var: no space left"
        );
    }
}
