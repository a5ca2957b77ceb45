//! Namespaces of a server of protocol v3: made, found and ended, one claim's at a time.

use divvy_model::{GpuTarget, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer};

use super::error::SupervisorError;
use super::files::{Files, remove};
use super::find::find;
use super::known::COMMAND_WITHIN;
use super::programs::Settings;
use crate::control::{Control, Row};
use crate::note::Note;
use crate::plan::Found;

/// Makes a namespace, or one of another size in its place. Leaves nothing if it fails.
pub(super) fn put(
    settings: &Settings,
    (target, files): (&GpuTarget, &Files),
    namespace: MpsNamespace,
) -> Result<(), SupervisorError> {
    let (Some(note), Found::Running(MpsServer::NAMESPACES)) = find(settings, files)? else {
        return Err(SupervisorError::NoServer(target.clone()));
    };
    tracing::info!(%target, ?namespace, "MPS namespace");
    settings.with_control(files, MpsProtocol::V3, |control| {
        let name = namespace.name;
        match listed(control, name)? {
            Some(row) if known(&row, &note) == Some(namespace) => return Ok(()),
            Some(_) => {
                delete(control, name, &[false], SupervisorError::InUse(name))?;
                forget(files, name)?;
            }
            None => {}
        }
        let made = make(control, &namespace).and_then(|()| {
            files.change_note(|note| {
                note.namespaces.insert(name, namespace);
            })
        });
        if made.is_err()
            && let Err(left) = delete(control, name, &[true], SupervisorError::Left(name))
        {
            tracing::error!(%target, %left, "failed to end what a failed namespace has left");
        }
        made
    })
}

/// Ends a namespace. Clients that are left in it are ended: their claim is gone.
pub(super) fn end(
    settings: &Settings,
    (target, files): (&GpuTarget, &Files),
    name: MpsNamespaceName,
) -> Result<(), SupervisorError> {
    // Without a server there are no namespaces.
    if let Found::Running(MpsServer::NAMESPACES) = find(settings, files)?.1 {
        tracing::info!(%target, %name, "end of an MPS namespace");
        settings.with_control(files, MpsProtocol::V3, |control| {
            if listed(control, name)?.is_some() {
                delete(control, name, &[false, true], SupervisorError::Left(name))?;
            }
            Ok(())
        })?;
        forget(files, name)?;
    }
    // Of a daemon that has died, or that leaves it.
    remove(&files.pipe(MpsProtocol::V3).join(name.folder()))
}

/// Returns the namespaces of a daemon that runs, as it lists them. A namespace that is not noted,
/// or has other limits than noted, was only begun. A daemon that does not answer has those that are
/// noted: nothing is lost while it lives.
pub(super) fn of_rows(listed: Option<&[Row]>, note: &Note) -> Vec<MpsNamespace> {
    match listed {
        Some(rows) => rows.iter().filter_map(|row| known(row, note)).collect(),
        None => note.namespaces.values().copied().collect(),
    }
}

/// Returns a listed namespace with its limits, if it is one of ours.
fn known(row: &Row, note: &Note) -> Option<MpsNamespace> {
    let name: MpsNamespaceName = row.name.parse().ok()?;
    let begun = MpsNamespace {
        name,
        cores: 0,
        memory_mib: None,
    };
    let noted = note.namespaces.get(&name).copied();
    Some(noted.filter(|noted| row.is(noted)).unwrap_or(begun))
}

fn forget(files: &Files, name: MpsNamespaceName) -> Result<(), SupervisorError> {
    files.change_note(|note| {
        note.namespaces.remove(&name);
    })
}

fn listed(control: &Control<'_>, name: MpsNamespaceName) -> Result<Option<Row>, SupervisorError> {
    let rows = control.namespaces(COMMAND_WITHIN)?;
    Ok(rows.into_iter().find(|row| row.name == name.to_string()))
}

/// Makes a namespace, whose sockets must be where containers get them from.
fn make(control: &Control<'_>, namespace: &MpsNamespace) -> Result<(), SupervisorError> {
    let name = namespace.name;
    control.create_namespace(namespace, COMMAND_WITHIN)?;
    let found = control.folder_of(name, COMMAND_WITHIN)?;
    let expected = control.pipe.join(name.folder());
    // As a daemon in another root names it.
    let is_there = found == expected || control.driver.root.see(&found) == expected;
    if is_there && expected.is_dir() {
        Ok(())
    } else {
        Err(SupervisorError::Elsewhere { name, found })
    }
}

/// Ends a namespace, by force or not, in this order, until it is gone.
fn delete(
    control: &Control<'_>,
    name: MpsNamespaceName,
    tries: &[bool],
    or: SupervisorError,
) -> Result<(), SupervisorError> {
    for force in tries {
        control.delete_namespace(name, *force, COMMAND_WITHIN)?;
        if listed(control, name)?.is_none() {
            return Ok(());
        }
    }
    Err(or)
}
