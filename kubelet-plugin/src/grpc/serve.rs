//! Serves gRPC on a Unix socket.

use anyhow::Context;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

/// Serves gRPC on a socket until `stop`.
pub(crate) async fn serve(
    name: &'static str,
    router: Router,
    listener: UnixListener,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let connections = UnixListenerStream::new(listener);
    let served = router
        .serve_with_incoming_shutdown(connections, stop.cancelled_owned())
        .await;
    served.with_context(|| format!("the server of the {name} socket failed"))
}
