//! Static types.

use std::fmt;

/// A static type; `Dyn` is anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ty {
    Dyn,
    /// The value of an attribute.
    Any,
    Bool,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    Null,
    Type,
    Quantity,
    Semver,
    Device,
    List(Box<Ty>),
    Map(Box<Ty>, Box<Ty>),
    Optional(Box<Ty>),
}

impl Ty {
    pub(super) fn list(element: Ty) -> Self {
        Self::List(Box::new(element))
    }

    pub(super) fn map(key: Ty, value: Ty) -> Self {
        Self::Map(Box::new(key), Box::new(value))
    }

    pub(super) fn optional(inner: Ty) -> Self {
        Self::Optional(Box::new(inner))
    }

    pub(super) fn unknown(&self) -> bool {
        matches!(self, Self::Dyn | Self::Any)
    }

    pub(super) fn is_number(&self) -> bool {
        matches!(self, Self::Int | Self::Uint | Self::Double)
    }

    /// Whether a value of one may be given where the other is expected.
    pub(super) fn fits(&self, other: &Ty) -> bool {
        match (self, other) {
            (a, b) if a.unknown() || b.unknown() => true,
            (Self::List(a), Self::List(b)) | (Self::Optional(a), Self::Optional(b)) => a.fits(b),
            (Self::Map(ak, av), Self::Map(bk, bv)) => ak.fits(bk) && av.fits(bv),
            (Self::Null, Self::Optional(_)) | (Self::Optional(_), Self::Null) => true,
            (a, b) => a == b,
        }
    }

    /// The type of a value that is one or the other.
    pub(super) fn join(self, other: &Ty) -> Ty {
        if self == *other { self } else { Ty::Dyn }
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Dyn => "dyn",
            Self::Any => "any",
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Uint => "uint",
            Self::Double => "double",
            Self::String => "string",
            Self::Bytes => "bytes",
            Self::Null => "null",
            Self::Type => "type",
            Self::Quantity => "kubernetes.Quantity",
            Self::Semver => "kubernetes.Semver",
            Self::Device => "kubernetes.DRADevice",
            Self::List(element) => return write!(f, "list({element})"),
            Self::Map(key, value) => return write!(f, "map({key}, {value})"),
            Self::Optional(inner) => return write!(f, "optional_type({inner})"),
        };
        f.write_str(name)
    }
}
