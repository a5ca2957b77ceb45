//! `device` as a CEL value: a view over the API object that looks things up when asked.
//!
//! Nothing is copied or converted before an expression reads it; a selector that reads two
//! attributes of a device with thirty pays for two.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use ::cel::ExecutionError;
use ::cel::common::traits::{self, Container, Indexer, Iterable, Sizer};
use ::cel::common::types::{CelBool, CelInt, CelList, CelString, MAP_TYPE, Type};
use ::cel::common::value::{CowVal, Val};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

use divvy_model::Quantity;

use super::types::CelQuantity;
use crate::Semver;

/// The CEL type of the variable `device`.
static DEVICE: Type = Type::new_unspecified_type("kubernetes.DRADevice");

/// The variable `device`.
#[derive(Clone, Copy)]
pub(super) struct DeviceView<'a> {
    driver: &'a str,
    device: &'a Device,
    /// Knowledge of devices that several claims can have.
    shares: bool,
}

impl<'a> DeviceView<'a> {
    pub(super) fn new(driver: &'a str, device: &'a Device, shares: bool) -> Self {
        Self {
            driver,
            device,
            shares,
        }
    }
}

/// Says whether an attribute has no value that is known.
pub(super) fn is_empty(attribute: &DeviceAttribute) -> bool {
    let DeviceAttribute {
        bool,
        bools,
        int,
        ints,
        string,
        strings,
        version,
        versions,
    } = attribute;
    string.is_none()
        && int.is_none()
        && bool.is_none()
        && version.is_none()
        && strings.is_none()
        && ints.is_none()
        && bools.is_none()
        && versions.is_none()
}

impl fmt::Debug for DeviceView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.device.name)
    }
}

impl Val for DeviceView<'_> {
    fn get_type(&self) -> &Type {
        &DEVICE
    }

    fn cel_type() -> &'static Type {
        &DEVICE
    }

    /// There is only one device in an evaluation.
    fn equals(&self, other: &dyn Val) -> bool {
        other.get_type() == &DEVICE
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(*self)
    }
}

impl Indexer for DeviceView<'_> {
    fn get<'b, 'v>(&'b self, field: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let view = MapView {
            device: *self,
            keys: OnceLock::new(),
            level: Level::Domains(Kind::Attribute),
        };
        match text(field)? {
            "driver" => Ok(CowVal::owned(CelString::from(self.driver))),
            "attributes" => Ok(CowVal::owned(view)),
            "capacity" => Ok(CowVal::owned(MapView {
                level: Level::Domains(Kind::Capacity),
                ..view
            })),
            "allowMultipleAllocations" => {
                let shared = self.shares && self.device.allow_multiple_allocations == Some(true);
                Ok(CowVal::owned(CelBool::from(shared)))
            }
            other => Err(ExecutionError::function_error(
                "device",
                format!("undefined field '{other}'"),
            )),
        }
    }

    fn steal<'v>(self: Box<Self>, field: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok((*self).get(field)?.into_owned())
    }
}

/// Name of one of the two maps of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Attribute,
    Capacity,
}

/// Depth in the map: the domains, or the ids of one domain. `None` is a domain the device lacks:
/// empty.
#[derive(Clone, Copy)]
enum Level<'a> {
    Domains(Kind),
    Ids(Kind, Option<&'a str>),
}

/// `device.attributes`, `device.capacity`, or one domain of either.
struct MapView<'a> {
    device: DeviceView<'a>,
    level: Level<'a>,
    /// The keys as CEL values, made when a comprehension first walks over them.
    keys: OnceLock<Vec<CelString<'a>>>,
}

impl<'a> MapView<'a> {
    /// The qualified names of the map, in order.
    fn names(&self, kind: Kind) -> Box<dyn Iterator<Item = &'a str> + 'a> {
        let device = self.device.device;
        match kind {
            Kind::Attribute => Box::new(
                device
                    .attributes
                    .iter()
                    .flatten()
                    .map(|(name, _)| name.as_str()),
            ),
            Kind::Capacity => Box::new(
                device
                    .capacity
                    .iter()
                    .flatten()
                    .map(|(name, _)| name.as_str()),
            ),
        }
    }

    /// A name's domain and id; a bare name is in the driver's domain.
    fn split(&self, name: &'a str) -> (&'a str, &'a str) {
        name.split_once('/').unwrap_or((self.device.driver, name))
    }

    fn keys(&self) -> &[CelString<'a>] {
        self.keys.get_or_init(|| {
            let keys: BTreeSet<&'a str> = match self.level {
                Level::Domains(kind) => self.names(kind).map(|n| self.split(n).0).collect(),
                Level::Ids(kind, Some(domain)) => {
                    let all = self.names(kind).map(|n| self.split(n));
                    all.filter(|(d, _)| *d == domain)
                        .map(|(_, id)| id)
                        .collect()
                }
                Level::Ids(_, None) => BTreeSet::new(),
            };
            keys.into_iter().map(CelString::from).collect()
        })
    }

    /// The device's own spelling of a domain, which outlives the expression's.
    fn domain(&self, kind: Kind, wanted: &str) -> Option<&'a str> {
        self.names(kind)
            .map(|name| self.split(name).0)
            .find(|domain| *domain == wanted)
    }

    /// The value behind an id of a domain, if the device has it.
    fn value<'v>(
        &self,
        kind: Kind,
        domain: &str,
        id: &str,
    ) -> Option<Result<Box<dyn Val + 'v>, ExecutionError>>
    where
        'a: 'v,
    {
        if id.contains('/') {
            // `domain/id` is how the API spells a name, never an id.
            return None;
        }
        let device = self.device.device;
        let bare = (domain == self.device.driver).then_some(id);
        let qualified = || format!("{domain}/{id}");
        match kind {
            Kind::Attribute => {
                let map = device.attributes.as_ref()?;
                let found = bare
                    .and_then(|id| map.get(id))
                    .or_else(|| map.get(&qualified()))?;
                Some(attribute(found, id))
            }
            Kind::Capacity => {
                let map = device.capacity.as_ref()?;
                let found = bare
                    .and_then(|id| map.get(id))
                    .or_else(|| map.get(&qualified()))?;
                let amount = found.value.0.parse::<Quantity>();
                let amount = amount.map(|q| Box::new(CelQuantity(q)) as Box<dyn Val + 'v>);
                Some(amount.map_err(|e| ExecutionError::function_error("capacity", e)))
            }
        }
    }
}

/// A list as a CEL list, element by element.
fn list<'a: 'v, 'v, T, V: Val + 'v>(
    items: &'a [T],
    value: impl Fn(&'a T) -> Result<V, ExecutionError>,
) -> Result<Box<dyn Val + 'v>, ExecutionError> {
    let items: Result<Vec<Box<dyn Val + 'v>>, ExecutionError> = items
        .iter()
        .map(|item| Ok(Box::new(value(item)?) as Box<dyn Val + 'v>))
        .collect();
    Ok(Box::new(CelList::from(items?)))
}

/// An attribute as the CEL value of its type.
fn attribute<'a: 'v, 'v>(
    attribute: &'a DeviceAttribute,
    id: &str,
) -> Result<Box<dyn Val + 'v>, ExecutionError> {
    let version = |text: &str| -> Result<Semver, ExecutionError> {
        text.parse()
            .map_err(|e| ExecutionError::function_error("attributes", format!("parse semver: {e}")))
    };
    match attribute {
        DeviceAttribute { int: Some(v), .. } => Ok(Box::new(CelInt::from(*v))),
        DeviceAttribute { bool: Some(v), .. } => Ok(Box::new(CelBool::from(*v))),
        DeviceAttribute {
            string: Some(v), ..
        } => Ok(Box::new(CelString::from(v.as_str()))),
        DeviceAttribute {
            version: Some(v), ..
        } => Ok(Box::new(version(v)?)),
        DeviceAttribute { ints: Some(v), .. } => list(v, |i| Ok(CelInt::from(*i))),
        DeviceAttribute { bools: Some(v), .. } => list(v, |b| Ok(CelBool::from(*b))),
        DeviceAttribute {
            strings: Some(v), ..
        } => list(v, |s| Ok(CelString::from(s.as_str()))),
        DeviceAttribute {
            versions: Some(v), ..
        } => list(v, |s| version(s)),
        _ => Err(no_such_key(id)),
    }
}

impl fmt::Debug for MapView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.keys().iter().map(CelString::inner))
            .finish()
    }
}

impl Val for MapView<'_> {
    fn get_type(&self) -> &Type {
        &MAP_TYPE
    }

    fn cel_type() -> &'static Type {
        &MAP_TYPE
    }

    fn equals(&self, other: &dyn Val) -> bool {
        let (Some(sizer), Some(indexer)) = (other.as_sizer(), other.as_indexer()) else {
            return false;
        };
        let same = |key: &CelString<'_>| match (self.get(key), indexer.get(key)) {
            (Ok(own), Ok(other)) => own.equals(other.as_ref()),
            _ => false,
        };
        other.get_type() == &MAP_TYPE && sizer.size() == self.size() && self.keys().iter().all(same)
    }

    fn as_container(&self) -> Option<&dyn Container> {
        Some(self)
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_iterable<'b, 'v>(&'b self) -> Option<&'b (dyn Iterable + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_sizer(&self) -> Option<&dyn Sizer> {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(MapView {
            device: self.device,
            level: self.level,
            keys: OnceLock::new(),
        })
    }
}

impl Indexer for MapView<'_> {
    fn get<'b, 'v>(&'b self, key: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let key = text(key)?;
        match self.level {
            Level::Domains(kind) => Ok(CowVal::owned(MapView {
                device: self.device,
                level: Level::Ids(kind, self.domain(kind, key)),
                keys: OnceLock::new(),
            })),
            Level::Ids(kind, domain) => {
                let value = domain.and_then(|domain| self.value(kind, domain, key));
                value
                    .unwrap_or_else(|| Err(no_such_key(key)))
                    .map(CowVal::Owned)
            }
        }
    }

    fn steal<'v>(self: Box<Self>, key: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let view = MapView {
            device: self.device,
            level: self.level,
            keys: OnceLock::new(),
        };
        let value = view.get(key)?;
        Ok(value.into_owned())
    }
}

impl Container for MapView<'_> {
    fn contains(&self, key: &dyn Val) -> Result<bool, ExecutionError> {
        let key = text(key)?;
        Ok(match self.level {
            // Indexing an unknown domain works, but the map does not claim to have it.
            Level::Domains(kind) => self.domain(kind, key).is_some(),
            Level::Ids(kind, domain) => {
                domain.is_some_and(|domain| self.value(kind, domain, key).is_some())
            }
        })
    }
}

impl Sizer for MapView<'_> {
    fn size(&self) -> CelInt {
        CelInt::from(i64::try_from(self.keys().len()).unwrap_or(i64::MAX))
    }
}

struct Keys<'b, 'a>(std::slice::Iter<'b, CelString<'a>>);

impl<'b, 'v, 'a: 'v> traits::Iterator<'b, 'v> for Keys<'b, 'a> {
    fn next(&mut self) -> Option<&'b (dyn Val + 'v)> {
        self.0.next().map(|key| key as &(dyn Val + 'v))
    }
}

impl Iterable for MapView<'_> {
    fn iter<'b, 'v>(&'b self) -> Box<dyn traits::Iterator<'b, 'v> + 'b>
    where
        Self: 'v,
    {
        Box::new(Keys(self.keys().iter()))
    }
}

fn text<'b>(key: &'b (dyn Val + '_)) -> Result<&'b str, ExecutionError> {
    key.downcast_ref::<CelString>()
        .map(CelString::inner)
        .ok_or_else(|| ExecutionError::UnexpectedType {
            got: key.get_type().name().to_owned(),
            want: "string".to_owned(),
        })
}

fn no_such_key(key: &str) -> ExecutionError {
    ExecutionError::NoSuchKey(Arc::new(key.to_owned()))
}
