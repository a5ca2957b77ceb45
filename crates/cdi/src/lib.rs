//! CDI documents: build, validate, minimum version.
