//! The changes of a GPU's MPS servers and their namespaces, with the notes about them.

use std::time::Duration;

use divvy_gpu::{Cause, ChangeError, MpsNote};
use divvy_model::{GpuTarget, MigUuid, MpsNamespace, MpsNamespaceName, MpsServer, Target};

use super::{Failed, Work};
use crate::hardware::ServerStart;

/// Time limit for a change of an MPS server: for its end 5 s in which it may end by itself, and
/// what killing it takes.
const SERVER_WITHIN: Duration = Duration::from_secs(15);

impl Work<'_, '_> {
    /// Ends the MPS server of a target, whichever runs. The note goes only when it has certainly
    /// ended.
    pub(super) fn stop_mps(&mut self, target: Target) -> Result<(), ChangeError> {
        let of = self.of_gpu(target);
        let stopped = self.gpus.hardware.mps.stop(&of, self.server_until());
        match &stopped {
            Ok(()) => drop(self.open.state.mps.remove(&target)),
            Err(ChangeError::NotDone(_)) => {}
            Err(ChangeError::Unknown(_)) => self.open.state.doubt_server(target),
        }
        stopped
    }

    /// Starts an MPS server: noted before, so that whatever the call leaves is stopped again.
    pub(super) fn start_mps(&mut self, target: Target, server: MpsServer) -> Result<(), Failed> {
        let partition = self.partition_of(target)?;
        self.no_other_server_is_used(target, server)?;
        // Note it before the call.
        let before = self.open.state.mps.clone();
        self.open.state.note_server(target, server, false);
        if let Err(error) = self.save() {
            self.open.state.mps = before;
            return Err(error.into());
        }
        // Start it, and note the outcome.
        let started = self.start_server(target, partition.as_ref(), server, false);
        match &started {
            Ok(()) => self.open.state.note_server(target, server, true),
            Err(ChangeError::NotDone(_)) => self.open.state.mps = before,
            // Asked again, or stopped, by the next call.
            Err(ChangeError::Unknown(_)) => {}
        }
        Ok(started?)
    }

    /// Refuses to start a server where another one runs that other claims use. It is not ended for
    /// this claim, so that it is still there.
    fn no_other_server_is_used(
        &self,
        target: Target,
        server: MpsServer,
    ) -> Result<(), ChangeError> {
        let running = match &self.seen.mps {
            Some(Ok(running)) => running.get(&target),
            Some(Err(_)) | None => None,
        };
        if self.scope.is_server_of_others(target) && running.is_some_and(|one| one.server != server)
        {
            return Err(ChangeError::NotDone(Cause::new(
                "an MPS server with other limits runs there, and other claims use it: it ends with their pods",
            )));
        }
        Ok(())
    }

    /// Starts an MPS server anew. Until another one is certainly there, its note says that none may
    /// be, so that the next round starts one, and that it is wedged, so that a daemon which cannot
    /// be ended is reported once.
    pub(super) fn restart_mps(&mut self, target: Target, server: MpsServer) -> Result<(), Failed> {
        let partition = self.partition_of(target)?;
        // Note it before the call.
        let noted = self.open.state.mps.get(&target);
        let wedged = noted.and_then(|noted| noted.wedged);
        let up = false;
        let note = MpsNote { server, up, wedged };
        self.open.state.mps.insert(target, note);
        self.save()?;
        // Start it, and note that it is there.
        self.start_server(target, partition.as_ref(), server, true)?;
        self.open.state.note_server(target, server, true);
        Ok(())
    }

    fn start_server(
        &self,
        target: Target,
        partition: Option<&MigUuid>,
        server: MpsServer,
        anew: bool,
    ) -> Result<(), ChangeError> {
        let start = ServerStart {
            server,
            partition,
            anew,
        };
        let servers = self.gpus.hardware.mps;
        servers.start(&self.of_gpu(target), start, self.server_until())
    }

    /// Returns the partition of a target, by its UUID, which is another one each time that it is
    /// made.
    fn partition_of(&self, target: Target) -> Result<Option<MigUuid>, ChangeError> {
        let partition = target.place().map(|place| {
            let made = self.open.state.partition_at(place);
            made.ok_or_else(|| {
                ChangeError::NotDone(Cause::new("its partition is not there").passing())
            })
        });
        partition.transpose()
    }

    /// Makes a namespace. It needs no note: the supervisor lists it, and a round ends what no claim
    /// needs.
    pub(super) fn put_namespace(&self, namespace: MpsNamespace) -> Result<(), ChangeError> {
        let servers = self.gpus.hardware.mps;
        let gpu = self.of_gpu(Target::Gpu);
        servers.put_namespace(&gpu, namespace, self.server_until())
    }

    pub(super) fn remove_namespace(&self, name: MpsNamespaceName) -> Result<(), ChangeError> {
        let servers = self.gpus.hardware.mps;
        let gpu = self.of_gpu(Target::Gpu);
        servers.remove_namespace(&gpu, name, self.server_until())
    }

    fn of_gpu(&self, target: Target) -> GpuTarget {
        let gpu = self.gpu.clone();
        GpuTarget { gpu, target }
    }

    fn server_until(&self) -> Duration {
        self.gpus.context.now() + SERVER_WITHIN
    }
}
