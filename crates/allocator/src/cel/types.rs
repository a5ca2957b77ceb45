//! `kubernetes.Quantity` and `kubernetes.Semver` as CEL values.

use std::any::Any;

use cel::common::types::Type;
use cel::common::value::{StaticVal, Val};

use divvy_model::Quantity;

use crate::Semver;

/// A quantity as a CEL value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CelQuantity(pub(super) Quantity);

/// The CEL type of [`CelQuantity`].
pub(super) static QUANTITY: Type = Type::new_unspecified_type("kubernetes.Quantity");
/// The CEL type of [`Semver`].
pub(super) static SEMVER: Type = Type::new_unspecified_type("kubernetes.Semver");

macro_rules! opaque_value {
    ($rust:ty, $cel:ident) => {
        impl Val for $rust {
            fn get_type(&self) -> &Type {
                &$cel
            }

            fn cel_type() -> &'static Type {
                &$cel
            }

            fn equals(&self, other: &dyn Val) -> bool {
                other
                    .downcast_ref::<$rust>()
                    .is_some_and(|other| self == other)
            }

            fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
                Box::new(self.clone())
            }

            fn as_any(&self) -> Option<&dyn Any> {
                Some(self)
            }
        }

        impl StaticVal for $rust {}
    };
}

opaque_value!(CelQuantity, QUANTITY);
opaque_value!(Semver, SEMVER);
