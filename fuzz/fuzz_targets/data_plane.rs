//! A store node's data plane processes a peer's bytes according to its protocol for any chunking: the same responses and the same memory
//! as in a sequential model.
//!
//! The first byte is the length of a chunk. Then steps: a byte for the kind of message, an offset of two bytes, a size of one, and for
//! a write this number of bytes, each of which is sent 16 times.

#![no_main]

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, LazyLock};

use crc_fast::crc32_iscsi;
use libfuzzer_sys::fuzz_target;
use moongate_runtime::Supervisor;
use moongate_transfer::TransferProtocol;
use moongate_transfer::plane::{
    MappingId, NO_CHECKSUM, TransferHeader, TransferOperation, TransferStatus, trailer,
};
use moongate_transfer::serve::{self, AddressRange, TransferServer, TransferServerOptions, TransferTarget};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

const BASE: u64 = 0x10_0000_0000;
const SIZE: usize = 1 << 16;
const REPEAT: usize = 16;

struct DataPlaneMemory(Mutex<Vec<u8>>);

impl DataPlaneMemory {
    fn part(&self, span: AddressRange) -> Vec<u8> {
        let start = (span.start - BASE) as usize;
        self.0.lock()[start..start + span.size as usize].to_vec()
    }
}

impl TransferTarget for DataPlaneMemory {
    fn contains(&self, span: AddressRange) -> bool {
        span.start >= BASE && span.start + span.size <= BASE + SIZE as u64
    }

    fn is_readable(&self, _: AddressRange) -> bool {
        true
    }

    fn receive(
        &self,
        mut socket: &TcpStream,
        span: AddressRange,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let mut bytes = vec![0; span.size as usize];
        socket.read_exact(&mut bytes)?;
        let is_whole = whole(summed.then(|| crc32_iscsi(&bytes)))?;
        let start = (span.start - BASE) as usize;
        self.0.lock()[start..start + bytes.len()].copy_from_slice(&bytes);
        Ok(is_whole)
    }

    fn send(&self, mut socket: &TcpStream, span: AddressRange) -> io::Result<()> {
        socket.write_all(&self.part(span))
    }

    fn send_summed(&self, mut socket: &TcpStream, span: AddressRange) -> io::Result<u32> {
        let bytes = self.part(span);
        socket.write_all(&bytes)?;
        Ok(crc32_iscsi(&bytes))
    }

    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: AddressRange,
        whole: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let mut bytes = vec![0; span.size as usize];
        source.read_exact(&mut bytes)?;
        let is_whole = whole(source, crc32_iscsi(&bytes))?;
        let start = (span.start - BASE) as usize;
        self.0.lock()[start..start + bytes.len()].copy_from_slice(&bytes);
        Ok(is_whole)
    }

    fn send_to(&self, sink: &mut dyn Write, span: AddressRange) -> io::Result<u32> {
        let bytes = self.part(span);
        sink.write_all(&bytes)?;
        Ok(crc32_iscsi(&bytes))
    }

    fn admit_mapped(&self, _: AddressRange, mapping: MappingId) -> bool {
        mapping == mapped(true)
    }

    fn receive_mapped(
        &self,
        _: AddressRange,
        wait: &mut dyn FnMut() -> io::Result<Option<u32>>,
    ) -> io::Result<bool> {
        wait().map(|_| true)
    }

    fn checksum(&self, _: AddressRange) -> Option<u32> {
        None
    }
}

/// The id of the node's memory, or of another one.
fn mapped(is_current: bool) -> MappingId {
    MappingId::new(if is_current { 0x00c0_ffee } else { 0x00be_ef00 })
}

struct DataPlaneNode {
    memory: Arc<DataPlaneMemory>,
    serving: TransferServer,
    port: u16,
    _runtime: Runtime,
    _supervisor: Supervisor,
}

static NODE: LazyLock<DataPlaneNode> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let supervisor = Supervisor::new();
    let memory = Arc::new(DataPlaneMemory(Mutex::new(vec![0; SIZE])));
    let target: Arc<dyn TransferTarget> = Arc::<DataPlaneMemory>::clone(&memory);
    let (serving, port) = runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        (serve::listen(listener, target, TransferServerOptions::default(), &supervisor).unwrap(), port)
    });
    DataPlaneNode { memory, serving, port, _runtime: runtime, _supervisor: supervisor }
});

/// Messages of a peer, and their effect on a node.
#[derive(Default)]
struct DataPlaneModel {
    /// What is sent before the next answer of the first protocol is waited for, each time with the answers that come until then.
    exchanges: Vec<(Vec<u8>, usize)>,
    sent: Vec<u8>,
    responses: Vec<u8>,
    memory: Vec<u8>,
    has_ended: bool,
    /// Whether the node may close with bytes unread, which can take answers with it.
    is_cut: bool,
}

impl DataPlaneModel {
    fn request(&mut self, header: TransferHeader, body: &[u8], is_damaged: bool) {
        self.sent.extend(header.encode());
        if let TransferProtocol::Mapped(id) = header.protocol {
            return self.mapped_request(header, id);
        }
        let is_checked = header.protocol == TransferProtocol::Checked;
        let crc = crc32_iscsi(body) ^ u32::from(is_damaged);
        if header.operation == TransferOperation::Write {
            self.sent.extend(body);
            self.sent.extend(is_checked.then(|| trailer(crc)).into_iter().flatten());
        }
        if self.has_ended {
            return;
        }
        let has_status = header.protocol != TransferProtocol::V1;
        let start = header.address.wrapping_sub(BASE) as usize;
        if header.size == 0 || header.address < BASE || start + header.size as usize > SIZE {
            self.responses
                .extend(has_status.then(|| TransferStatus::Rejected.encode()).into_iter().flatten());
            self.has_ended = true;
            self.is_cut = !has_status;
            return;
        }
        let part = start..start + header.size as usize;
        match header.operation {
            TransferOperation::Write => {
                self.memory[part].copy_from_slice(body);
                let status =
                    if is_checked && is_damaged { TransferStatus::Damaged } else { TransferStatus::Ok };
                self.responses.extend(has_status.then(|| status.encode()).into_iter().flatten());
            }
            TransferOperation::Read => {
                self.responses.extend(has_status.then(|| TransferStatus::Ok.encode()).into_iter().flatten());
                self.responses.extend(&self.memory[part.clone()]);
                let crc = crc32_iscsi(&self.memory[part]);
                self.responses.extend(is_checked.then(|| trailer(crc)).into_iter().flatten());
            }
        }
        if header.protocol == TransferProtocol::V1 && header.operation == TransferOperation::Read {
            self.exchanges.push((std::mem::take(&mut self.sent), self.responses.len()));
        }
    }

    /// A request whose body the peer copies itself, which it does not do here.
    fn mapped_request(&mut self, header: TransferHeader, id: MappingId) {
        let is_write = header.operation == TransferOperation::Write;
        self.sent.extend(is_write.then_some(NO_CHECKSUM).into_iter().flatten());
        if self.has_ended {
            return;
        }
        let start = header.address.wrapping_sub(BASE) as usize;
        let is_outside = header.size == 0 || header.address < BASE || start + header.size as usize > SIZE;
        if is_outside || id != mapped(true) {
            self.responses.extend(TransferStatus::Rejected.encode());
            self.has_ended = true;
        } else if is_write {
            self.responses.extend(TransferStatus::OkWithoutReceipt.encode());
        } else {
            self.responses.extend(TransferStatus::Ok.encode());
            self.responses.extend(NO_CHECKSUM);
        }
    }

    /// Bytes that are not a request.
    fn garbage(&mut self, bytes: &[u8]) {
        let mut header = [0x55; 24];
        header[..bytes.len().min(16)].copy_from_slice(&bytes[..bytes.len().min(16)]);
        self.sent.extend(header);
        (self.has_ended, self.is_cut) = (true, self.is_cut || !self.has_ended);
    }

    fn from_input(mut steps: &[u8]) -> Self {
        let mut model = Self { memory: vec![0; SIZE], ..Self::default() };
        while let [step, low, high, size, rest @ ..] = steps {
            let operation = if step & 1 == 0 { TransferOperation::Read } else { TransferOperation::Write };
            let protocol = [
                TransferProtocol::V1,
                TransferProtocol::V2,
                TransferProtocol::Checked,
                TransferProtocol::Mapped(mapped(true)),
                TransferProtocol::Mapped(mapped(false)),
            ][usize::from(step / 2) % 5];
            let count =
                if operation == TransferOperation::Write { usize::from(*size).min(rest.len()) } else { 0 };
            let (body, rest) = rest.split_at(count);
            steps = rest;
            if step & 0xe0 == 0xe0 {
                model.garbage(body);
                continue;
            }
            let body: Vec<u8> = body.iter().flat_map(|byte| [*byte; REPEAT]).collect();
            let size =
                if operation == TransferOperation::Write { body.len() } else { usize::from(*size) * REPEAT };
            let address =
                BASE + u64::from(u16::from_le_bytes([*low, *high])) - u64::from(step & 0xe0 == 0xc0);
            let header = TransferHeader { size: size as u64, address, operation, protocol };
            model.request(header, &body, step & 0xe0 == 0xa0);
        }
        let rest = std::mem::take(&mut model.sent);
        model.exchanges.push((rest, usize::MAX));
        model
    }
}

/// All responses of a node.
fn exchange(model: &DataPlaneModel, piece: usize) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(("127.0.0.1", NODE.port))?;
    stream.set_nodelay(true)?;
    let mut answers = Vec::new();
    for (sent, until) in &model.exchanges {
        for piece in sent.chunks(piece) {
            stream.write_all(piece)?;
        }
        if *until == usize::MAX {
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_end(&mut answers)?;
        } else {
            let have = answers.len();
            answers.resize(*until, 0);
            stream.read_exact(&mut answers[have..])?;
        }
    }
    Ok(answers)
}

fuzz_target!(|input: &[u8]| {
    let Some((piece, steps)) = input.split_first() else { return };
    let model = DataPlaneModel::from_input(steps);
    NODE.memory.0.lock().fill(0);
    let answers = exchange(&model, usize::from(*piece) * 4 + 1);
    match answers {
        Ok(answers) if !model.is_cut => assert_eq!(answers, model.responses),
        Ok(answers) => assert!(model.responses.starts_with(&answers)),
        Err(error) => assert!(model.has_ended, "{error}"),
    }
    // Wait until the connection's thread has ended before comparing its memory.
    while NODE.serving.open() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(*NODE.memory.0.lock(), model.memory);
});
