//! The little HTTP/2 that a kubelet's registration call needs, written by hand, because no Rust client will send the
//! `:authority` that the kubelet sends: the percent-encoded path of the socket, which is no valid host.

use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// Why a raw call failed.
#[derive(Debug, thiserror::Error)]
pub enum RawError {
    /// The socket does not answer.
    #[error("the socket does not answer")]
    Io(#[from] std::io::Error),
    /// The server refused the request before gRPC saw it.
    #[error("the server reset the stream with HTTP/2 error {0} (1 is PROTOCOL_ERROR)")]
    Reset(u32),
    /// The server is going away.
    #[error("the server closed the connection")]
    Closed,
    /// The call ended without an answer: it failed in the server.
    #[error("the server answered with a gRPC error")]
    Refused,
}

/// `:authority` as grpc-go makes it from a socket path: everything escaped but unreserved characters, sub-delimiters
/// and `:[]@`.
pub(crate) fn authority(socket: &Path) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    for byte in socket.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(byte) {
            out.push(char::from(*byte));
        } else {
            // Writing to a String does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// An HTTP/2 connection with at most one call.
pub(crate) struct Connection {
    stream: UnixStream,
}

struct Frame {
    kind: u8,
    flags: u8,
    payload: Vec<u8>,
}

impl Connection {
    /// Connects and introduces itself.
    pub(crate) async fn open(socket: &Path) -> Result<Self, RawError> {
        let mut connection = Self { stream: UnixStream::connect(socket).await? };
        connection.stream.write_all(PREFACE).await?;
        connection.send(SETTINGS, 0, 0, &[]).await?;
        Ok(connection)
    }

    /// One unary gRPC call: path, message in, message out.
    pub(crate) async fn call(
        mut self,
        authority: &str,
        path: &str,
        message: &[u8],
    ) -> Result<Vec<u8>, RawError> {
        let mut head = vec![0x83, 0x86]; // :method POST, :scheme http
        head.push(0x04); // :path, not indexed
        push_text(&mut head, path);
        head.push(0x01); // :authority, not indexed
        push_text(&mut head, authority);
        let plain =
            [("content-type", "application/grpc"), ("user-agent", "grpc-go/1.72.2"), ("te", "trailers")];
        for (name, value) in plain {
            head.push(0x00);
            push_text(&mut head, name);
            push_text(&mut head, value);
        }
        self.send(HEADERS, END_HEADERS, 1, &head).await?;
        let mut body = vec![0];
        body.extend(u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
        body.extend(message);
        self.send(DATA, END_STREAM, 1, &body).await?;

        let mut answer = Vec::new();
        loop {
            let frame = self.next().await?;
            match frame.kind {
                DATA => answer.extend(frame.payload),
                RST_STREAM => return Err(RawError::Reset(number(&frame.payload))),
                GOAWAY => return Err(RawError::Closed),
                HEADERS if frame.flags & END_STREAM != 0 => break,
                _ => {}
            }
        }
        // A success has a message, if an empty one; an error has only trailers. Reading those would need HPACK.
        answer.get(5..).map(<[u8]>::to_vec).ok_or(RawError::Refused)
    }

    /// Keeps the connection until the server closes it or says that it will.
    pub(crate) async fn until_closed(mut self) {
        while let Ok(frame) = self.next().await {
            if frame.kind == GOAWAY {
                return;
            }
        }
    }

    /// The next frame of interest; housekeeping is answered here.
    async fn next(&mut self) -> Result<Frame, RawError> {
        loop {
            let mut head = [0_u8; 9];
            self.stream.read_exact(&mut head).await?;
            let [a, b, c, kind, flags, ..] = head;
            let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            let mut payload = vec![0; length];
            self.stream.read_exact(&mut payload).await?;
            match (kind, flags & ACK) {
                (SETTINGS, 0) => self.send(SETTINGS, ACK, 0, &[]).await?,
                (PING, 0) => self.send(PING, ACK, 0, &payload).await?,
                _ => return Ok(Frame { kind, flags, payload }),
            }
        }
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Result<(), RawError> {
        let [_, a, b, c] = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
        let mut frame = vec![a, b, c, kind, flags];
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        Ok(self.stream.write_all(&frame).await?)
    }
}

/// An HPACK string without Huffman coding.
fn push_text(out: &mut Vec<u8>, text: &str) {
    let mut length = text.len();
    if let Some(short) = u8::try_from(length).ok().filter(|l| *l < 127) {
        out.push(short);
    } else {
        out.push(127);
        length -= 127;
        while length >= 128 {
            out.push(0x80 | u8::try_from(length % 128).unwrap_or(0));
            length /= 128;
        }
        out.push(u8::try_from(length).unwrap_or(0));
    }
    out.extend(text.as_bytes());
}

fn number(payload: &[u8]) -> u32 {
    payload.iter().take(4).fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}
